"""CUDA for the portable archive, out of base images that have the layout, links and oddities of real ones."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.errors import OciBuilderError, PolicyError, SpecError
from oci_builder.model.events import Event, silent
from oci_builder.model.image import Layer
from oci_builder.model.spec import OciBase, Spec
from oci_builder.payload.cuda import cuda_texts, stage_cuda
from oci_builder.payload.licences import collect_licences
from oci_builder.rootfs.layers import WriteOptions
from oci_builder.store.blobs import DirStore
from oci_builder.transports.bases import load_base
from oci_builder.transports.rootfs import load_rootfs
from tests.lab import tarlang as t
from tests.lab.archives import Lab, write

ROOT = b"usr/local/cuda-13.0/"
ARCH = ROOT + b"targets/x86_64-linux/"
# As NVIDIA's packages lay it out (13.0.2-devel-ubuntu22.04), small.
TOOLS = (b"nvcc", b"ptxas", b"cuobjdump", b"fatbinary", b"cudafe++", b"nvlink", b"nvdisasm")
LAYOUT = (
    t.symlink(b"usr/local/cuda", b"/etc/alternatives/cuda"),
    t.symlink(b"etc/alternatives/cuda", b"/usr/local/cuda-13.0"),
    t.folder(ROOT[:-1]),
    *(t.file(ROOT + b"bin/" + name, name, mode=0o755) for name in TOOLS),
    t.file(ROOT + b"bin/nvcc.profile", b"TOP = $(_HERE_)/.."),
    t.file(ROOT + b"bin/crt/link.stub", b"stub"),
    t.file(ROOT + b"bin/nsys-ui", b"no"),
    t.symlink(ROOT + b"include", b"targets/x86_64-linux/include"),
    t.symlink(ROOT + b"lib64", b"targets/x86_64-linux/lib"),
    t.file(ARCH + b"include/cuda.h", b"#define CUDA_VERSION 13000"),
    t.file(ARCH + b"include/cccl/cuda/std/array", b"array"),
    t.symlink(ARCH + b"lib/libcudart.so", b"libcudart.so.13"),
    t.symlink(ARCH + b"lib/libcudart.so.13", b"/usr/local/cuda/lib64/libcudart.so.13.0.96"),
    t.file(ARCH + b"lib/libcudart.so.13.0.96", b"runtime"),
    t.file(ARCH + b"lib/libcublas_static.a", b"huge"),
    t.file(ARCH + b"lib/stubs/libcuda.so", b"driver stub"),
    t.file(ROOT + b"nvvm/bin/cicc", b"cicc", mode=0o755),
    t.file(ROOT + b"nvvm/libdevice/libdevice.10.bc", b"BC"),
    t.file(ROOT + b"compat/libcuda.so.580", b"driver"),
    t.file(b"usr/share/doc/cuda-nvcc-13-0/copyright", b"CUDA EULA"),
    t.file(b"usr/share/doc/bash/copyright", b"GPL"),
    t.file(b"NGC-DL-CONTAINER-LICENSE", b"NGC terms"),
)


class Base:
    """Base images made of tars, and the toolkit that is taken from them."""

    def __init__(self, place: Path, store: DirStore) -> None:
        self.place, self.store = place, store
        self.said: list[Event] = []

    def layers(self, *tars: bytes) -> tuple[Layer, ...]:
        write(self.place / "base.tar", Lab(layers=list(tars)).oci())
        wanted = spec().model_copy(update={"base": OciBase(oci="base.tar")})
        return load_base(wanted, self.place, self.store, WriteOptions()).image.layers

    def stage(self, *tars: bytes, work: str = "work", **choice: Any) -> Path:
        place = stage_cuda(spec(**choice), self.layers(*tars), self.store, self.place / work, emit=self.said.append)
        assert place is not None
        return place

    def refusal(self, *tars: bytes, **choice: Any) -> OciBuilderError:
        with pytest.raises(OciBuilderError) as caught:
            self.stage(*tars, **choice)
        assert list((self.place / "work").glob("*")) == []
        return caught.value


def spec(**choice: Any) -> Spec:
    return Spec.model_validate(
        {"name": "x", "tag": "t", "base": {"scratch": True}, "prefix": "/opt/x", "tiers": {"base": {"path": "/x"}},
         "cuda": choice}
    )  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Base]:
    with DirStore(tmp_path / "store") as store:
        yield Base(tmp_path, store)


def tree(root: Path) -> dict[str, object]:
    return {
        str(p.relative_to(root)): f"-> {os.readlink(p)}" if p.is_symlink() else p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def test_a_toolkit_of_nvidias_packages_through_alternatives(base: Base) -> None:
    place = base.stage(t.tar(*LAYOUT))
    assert tree(place) == {
        **{f"bin/{name.decode()}": name for name in TOOLS},
        "bin/nvcc.profile": b"TOP = $(_HERE_)/..", "bin/crt/link.stub": b"stub",
        "include": "-> targets/x86_64-linux/include", "lib64": "-> targets/x86_64-linux/lib",
        "targets/x86_64-linux/include/cuda.h": b"#define CUDA_VERSION 13000",
        "targets/x86_64-linux/include/cccl/cuda/std/array": b"array",
        "targets/x86_64-linux/lib/libcudart.so": "-> libcudart.so.13.0.96",
        "targets/x86_64-linux/lib/libcudart.so.13": "-> libcudart.so.13.0.96",
        "targets/x86_64-linux/lib/libcudart.so.13.0.96": b"runtime",
        "targets/x86_64-linux/lib/stubs/libcuda.so": b"driver stub",
        "nvvm/bin/cicc": b"cicc", "nvvm/libdevice/libdevice.10.bc": b"BC",
        "licences/cuda-nvcc-13-0.txt": b"CUDA EULA", "licences/NGC-DL-CONTAINER-LICENSE.txt": b"NGC terms",
    }  # fmt: skip


def test_modes_and_times_are_nobodys(base: Base) -> None:
    place = base.stage(t.tar(*LAYOUT))
    found = {p.stat().st_mode & 0o7777 for p in place.rglob("*") if p.is_file() and "bin/" in str(p.relative_to(place))}
    assert found == {0o755, 0o644} and {p.lstat().st_mtime_ns for p in (place, *place.rglob("*"))} == {0}


def test_the_layout_of_wheels_has_the_links_the_other_way_round(base: Base) -> None:
    parts = [t.file(b"opt/c/bin/" + name, name, mode=0o755) for name in TOOLS]
    parts += [t.file(b"opt/c/include/cuda.h", b"h"), t.file(b"opt/c/lib/libcudart.so.13", b"r")]
    parts += [t.symlink(b"opt/c/lib64", b"lib"), t.symlink(b"opt/c/targets/x86_64-linux/include", b"../../include")]
    found = tree(base.stage(t.tar(*parts), **{"from": "/opt/c"}))
    assert found["lib64"] == "-> lib" and found["lib/libcudart.so.13"] == b"r"
    assert found["targets/x86_64-linux/include"] == "-> ../../include" and found["include/cuda.h"] == b"h"


def test_higher_layers_win_and_whiteouts_hide(base: Base) -> None:
    over = t.tar(
        t.file(ROOT + b"bin/nvcc", b"newer", mode=0o755), t.file(ROOT + b"bin/.wh.nvlink"),
        t.file(ARCH + b"include/cccl/.wh..wh..opq"), t.file(ARCH + b"include/cccl/fresh", b"fresh"),
        t.symlink(ROOT + b"bin/nvdisasm", b"cuobjdump"), t.file(ROOT + b".wh.nvvm"),
        t.file(ROOT + b"nvvm/only", b"only"),
    )  # fmt: skip
    found = tree(base.stage(t.tar(*LAYOUT), over))
    assert found["bin/nvcc"] == b"newer" and found["bin/nvdisasm"] == "-> cuobjdump"
    assert "bin/nvlink" not in found
    assert [name for name in found if "cccl" in name] == ["targets/x86_64-linux/include/cccl/fresh"]
    assert [name for name in found if name.startswith("nvvm")] == ["nvvm/only"]


def test_a_folder_over_a_file_and_a_file_over_a_folder(base: Base) -> None:
    over = t.tar(
        t.folder(ROOT + b"bin/nvlink"), t.file(ROOT + b"bin/crt", b"now a file"), t.file(ROOT + b"nvvm/bin", b"file")
    )
    found = tree(base.stage(t.tar(*LAYOUT), over))
    assert "bin/nvlink" not in found and "bin/crt/link.stub" not in found
    assert found["nvvm/bin"] == b"file" and "nvvm/bin/cicc" not in found


@pytest.mark.parametrize("split", [False, True], ids=["same layer", "lower layer"])
@pytest.mark.parametrize("chosen", [b"bin/ptxas", b"elsewhere/ptxas"])
def test_hard_links_bring_their_content(base: Base, split: bool, chosen: bytes) -> None:
    target, link = ROOT + chosen, ROOT + b"bin/nvlink"
    first = [part for part in LAYOUT if part[:100].rstrip(b"\0") not in (link, ROOT + b"bin/ptxas")]
    first += [t.file(ROOT + b"bin/ptxas", b"X", mode=0o755)] if chosen == b"bin/ptxas" else []
    if chosen != b"bin/ptxas":
        first += [t.file(target, b"X", mode=0o755), t.hardlink(ROOT + b"bin/ptxas", target)]
    second = [t.hardlink(link, target), t.hardlink(link + b".not-chosen", target)]
    tars = [t.tar(*first), t.tar(*second)] if split else [t.tar(*first, *second)]
    found = tree(base.stage(*tars))
    assert (found["bin/nvlink"], found["bin/ptxas"]) == (b"X", b"X")
    assert "elsewhere/ptxas" not in found and "bin/nvlink.not-chosen" not in found


def test_a_chosen_link_brings_what_it_leads_to(base: Base) -> None:
    more = (t.symlink(ROOT + b"bin/nvcc", b"../libexec/nvcc"), t.file(ROOT + b"libexec/nvcc", b"real", mode=0o755))
    found = tree(base.stage(t.tar(*LAYOUT), t.tar(*more)))
    assert (found["bin/nvcc"], found["libexec/nvcc"]) == ("-> ../libexec/nvcc", b"real")


def test_what_is_missing_is_named(base: Base) -> None:
    tools = t.tar(*(part for part in LAYOUT if b"cuobjdump" not in part[:100] and b"bin/ptxas" not in part[:100]))
    error = base.refusal(tools)
    assert isinstance(error, SpecError) and error.code == "payload.cuda"
    assert error.fields["actual"] == "bin/ptxas, bin/cuobjdump"


@pytest.mark.parametrize("start", ["/usr/local/cuda-12", "/usr/local/cuda", "/etc/alternatives/cuda"])
def test_no_toolkit_there(base: Base, start: str) -> None:
    error = base.refusal(t.tar(t.file(b"etc/passwd", b"x")), **{"from": start})
    assert (error.code, "devel" in error.message) == ("payload.cuda", True)


@pytest.mark.parametrize("target", [b"/etc/shadow", b"../../../../../../../etc/shadow", b"/usr/local", b"/"])
def test_a_chosen_link_out_of_the_toolkit_is_refused(base: Base, target: bytes) -> None:
    evil = t.tar(t.file(b"etc/shadow", b"secret"), t.symlink(ARCH + b"include/evil.h", target))
    error = base.refusal(t.tar(*LAYOUT), evil)
    assert error.code == "payload.cuda" and "evil.h" in str(error.fields["actual"])


@pytest.mark.parametrize("target", [b"gone", b"e", b".."])
def test_a_chosen_link_to_nothing_is_left_out_and_said(base: Base, target: bytes) -> None:
    place = base.stage(t.tar(*LAYOUT), t.tar(t.symlink(ROOT + b"nvvm/e", target)))
    assert "nvvm/e" not in tree(place)
    assert any("nvvm/e" in event.message for event in base.said)


@pytest.mark.parametrize(
    "links",
    [
        [t.symlink(b"usr/local/cuda", b"/")],
        [t.symlink(b"usr/local/cuda", b"loop"), t.symlink(b"usr/local/loop", b"cuda")],
    ],
    ids=["root", "circle"],
)
def test_a_start_that_is_no_folder_is_refused(base: Base, links: list[bytes]) -> None:
    assert base.refusal(t.tar(*links)).code in ("payload.cuda", "layers.symlink")


def test_a_file_below_a_file_is_refused(base: Base) -> None:
    error = base.refusal(t.tar(*LAYOUT, t.file(ROOT + b"nvvm/a", b"x"), t.file(ROOT + b"nvvm/a/b", b"y")))
    assert isinstance(error, PolicyError)


def test_a_hard_link_to_nothing_is_refused(base: Base) -> None:
    error = base.refusal(t.tar(*LAYOUT, t.hardlink(ROOT + b"nvvm/a", b"nowhere")))
    assert (type(error), error.code) == (PolicyError, "entry.link_target")


def test_the_folder_that_stands_is_taken_and_another_choice_is_another_folder(base: Base) -> None:
    first = base.stage(t.tar(*LAYOUT))
    (first / "mine").touch()
    assert base.stage(t.tar(*LAYOUT)) == first and (first / "mine").exists()
    fewer = base.stage(t.tar(*LAYOUT), include=["bin/nvcc", "bin/ptxas", "bin/cuobjdump"])
    assert [name for name in tree(fewer) if not name.startswith("licences/")] == [
        "bin/cuobjdump",
        "bin/nvcc",
        "bin/ptxas",
    ]
    assert base.stage(t.tar(*LAYOUT, t.file(b"other", b"x"))) != first


def test_without_the_key_nothing_is_read(base: Base) -> None:
    plain = Spec.model_validate({k: v for k, v in spec().model_dump(exclude_none=True).items() if k != "cuda"})
    assert stage_cuda(plain, base.layers(t.tar(*LAYOUT)), base.store, base.place / "work", emit=silent) is None


def test_its_terms_are_among_the_licences(base: Base) -> None:
    out = collect_licences({}, cuda_texts(base.stage(t.tar(*LAYOUT))))
    assert {b"CUDA EULA", b"NGC terms"} <= set(out.values())
    assert cuda_texts(base.place / "nothing") == {"CUDA toolkit": b""}


@pytest.mark.parametrize("path", ["usr/local/cuda", "/", "/a/../b", "//", "/a\0"])
def test_a_start_that_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"cuda\.from"):
        spec(**{"from": path})


HOST = Path("/usr/local/cuda")


@pytest.mark.slow
@pytest.mark.skipif(not (HOST / "bin/nvcc").is_file(), reason="this machine has no CUDA toolkit to take")
def test_a_real_nvcc_compiles_from_where_it_was_put(base: Base, tmp_path: Path) -> None:
    root = tmp_path / "root/usr/local"
    root.mkdir(parents=True)
    subprocess.run(["cp", "-a", HOST.resolve(), root / "cuda-real"], check=True)
    (root / "cuda").symlink_to("/usr/local/cuda-real")
    if not (root / "cuda-real/bin/cuobjdump").exists():
        (root / "cuda-real/bin/cuobjdump").write_text("#!/bin/sh\n")
    layers = load_rootfs(tmp_path / "root", base.store).layers
    place = stage_cuda(spec(), layers, base.store, tmp_path / "work", emit=base.said.append)
    assert place is not None
    moved = place.rename(tmp_path / "a moved place")
    source = tmp_path / "k.cu"
    source.write_text("#include <cuda/std/array>\n__global__ void k(float *x) { x[0] = sinf(x[1]); }\n")
    argv: list[str | Path] = [moved / "bin/nvcc", "-arch=sm_100", "-c", source, "-o", tmp_path / "k.o"]
    done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
