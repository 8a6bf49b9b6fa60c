"""What of the base's CUDA toolkit a spec takes along."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StrictStr

from oci_builder.model.specvalues import SpecModel

# What compiling at run time takes (nvcc, NVRTC and the headers of both), without the static and device-side libraries.
# CUDA's own packages keep the files below targets/, wheels do not; the names through the toolkit's links count too.
CUDA_FILES = (
    "bin/nvcc", "bin/nvcc.profile", "bin/ptxas", "bin/fatbinary", "bin/cudafe++", "bin/nvlink", "bin/cuobjdump",
    "bin/nvdisasm", "bin/crt/*", "bin/__nvcc_device_query", "nvvm/*", "include/*", "lib64/libcudart*",
    "lib64/libcudadevrt.a", "lib64/libnvrtc.*", "lib64/libnvrtc-builtins.*", "lib64/stubs/libcuda.so*",
    "lib64/stubs/libnvrtc.so", "lib64/stubs/libnvidia-ml.so*", "version.json", "EULA.txt", "LICENSE",
)  # fmt: skip


def _image_path(value: str) -> str:
    if not value.startswith("/") or not value.strip("/") or {".", ".."} & set(value.split("/")) or "\0" in value:
        raise ValueError("must be an absolute path below /, without . or ..")
    return value


class Cuda(SpecModel):
    """The part of the base's CUDA toolkit that the portable archive brings along."""

    from_: Annotated[StrictStr, AfterValidator(_image_path)] = Field(
        default="/usr/local/cuda", alias="from", description="the toolkit's folder in the base, or a link to it"
    )
    include: tuple[StrictStr, ...] = Field(
        default=CUDA_FILES, min_length=1, description="patterns of paths below it; * matches slashes too"
    )
