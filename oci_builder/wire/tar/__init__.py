"""The tar codec: a strict reader and a deterministic writer. Names are bytes throughout."""

from oci_builder.wire.tar.entry import NO_XATTRS, Kind, TarEntry, kept_xattr
from oci_builder.wire.tar.header import BLOCK, END_OF_ARCHIVE
from oci_builder.wire.tar.keys import KeySet, name_key
from oci_builder.wire.tar.ledger import FolderLedger, NameLedger, too_many_folders
from oci_builder.wire.tar.names import Warn, clean_name, ignore, leads_deep
from oci_builder.wire.tar.reader import TarReader
from oci_builder.wire.tar.writer import encode_header, padding

__all__ = [
    "BLOCK",
    "END_OF_ARCHIVE",
    "NO_XATTRS",
    "FolderLedger",
    "KeySet",
    "Kind",
    "NameLedger",
    "TarEntry",
    "TarReader",
    "Warn",
    "clean_name",
    "encode_header",
    "ignore",
    "kept_xattr",
    "leads_deep",
    "name_key",
    "padding",
    "too_many_folders",
]
