"""The base ``{"host": true}``: a minimal root of the running machine, as an image of one layer."""

from __future__ import annotations

from oci_builder.model.events import Emit, silent
from oci_builder.model.image import Image
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.rootfs.host import PATH, host_plan
from oci_builder.rootfs.layers import LayerStore, WriteOptions, write_layer

SETTINGS = {"architecture": "amd64", "os": "linux", "config": {"Env": [f"PATH={PATH}"], "Cmd": ["/bin/sh"]}}


def load_host(
    store: LayerStore,
    *,
    epoch: int = 0,
    options: WriteOptions | None = None,
    limits: Limits = DEFAULT_LIMITS,
    emit: Emit = silent,
) -> Image:
    """The image. Idempotent; its layer is in the store afterwards.

    Args:
        epoch: newest time in the layer, seconds since 1970.
        options: codec, threads and cache.

    Raises:
        SpecError: ``spec.host`` when the machine lacks a shell or a standard library, ``scan.changed``.
        TransportError: ``io.*``.
    """
    plan = host_plan(epoch=epoch, limits=limits, emit=emit)
    layer = write_layer(plan, store, options, emit)
    return Image(SETTINGS, (layer,), base_layers=1)
