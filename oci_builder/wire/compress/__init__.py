"""Compression of layers: identity, gzip, zstd; block-parallel, with bytes that do not depend on the thread count.

``codecs`` holds the third-party compressors, ``gzipframe`` the gzip framing, ``encode`` and ``decode`` the two
pipelines, ``members`` the walk over members of our own layers.
"""

from oci_builder.wire.compress.codecs import BLOCK, Codec, Compression
from oci_builder.wire.compress.decode import Options, decode, decode_chunks, sniff
from oci_builder.wire.compress.encode import EncodedLayer, Member, compress_bytes, encode_layer, store_bytes
from oci_builder.wire.compress.members import gzip_members
from oci_builder.wire.compress.within import MemberSeen

__all__ = [
    "BLOCK",
    "Codec",
    "Compression",
    "EncodedLayer",
    "Member",
    "MemberSeen",
    "Options",
    "compress_bytes",
    "decode",
    "decode_chunks",
    "encode_layer",
    "gzip_members",
    "sniff",
    "store_bytes",
]
