"""Fixtures that several folders share: small tiers, and one quick image built from them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from oci_builder.build import BuildOptions, build

pytest.register_assert_rewrite("tests.lab.oracle")

# A shell that starts something in the background has it ignore Ctrl-C, nohup has it ignore the end of the terminal, and
# every program inherits that.
for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored is signal.SIGINT else signal.SIG_DFL)

# The same examples everywhere, and no time that one may take: hypothesis does so by itself only where it knows the CI.
hypothesis.settings.load_profile("ci")


@dataclass(frozen=True)
class Built:
    """A finished build.

    Attributes:
        out: folder with the five files.
        spec: its spec file; tiers lie beside it.
        cache: store and build cache that it used.
        container: ``container.json``.
    """

    out: Path
    spec: Path
    cache: Path
    container: dict[str, Any]

    @property
    def oci(self) -> Path:
        return self.out / "runtime.oci.tar"

    @property
    def docker(self) -> Path:
        return self.out / "runtime.docker.tar.gz"

    @property
    def portable(self) -> Path:
        return self.out / "runtime.tar.gz"

    @property
    def reference(self) -> str:
        return str(self.container["reference"])


def small_tiers(folder: Path) -> dict[str, Path]:
    """Two tiers that share a file by a hard link, one by content, and have their own; with links and a program."""
    one, two = folder / "envs/one", folder / "envs/two"
    for tier in (one, two):
        (tier / "bin").mkdir(parents=True)
        (tier / "lib/pkg").mkdir(parents=True)
        (tier / "lib/pkg/equal.py").write_text("VALUE = 'equal'\n" * 2000)
        (tier / "lib/pkg/own.py").write_text(f"VALUE = {tier.name!r}\n")
        (tier / "lib/link.py").symlink_to("pkg/own.py")
        (tier / "bin/hello").write_text('#!/bin/sh\nexec cat "$(dirname "$0")/../lib/pkg/own.py"\n')
        (tier / "bin/hello").chmod(0o755)
    (one / "lib/pkg/shared.bin").write_bytes(bytes(range(256)) * 4096)
    os.link(one / "lib/pkg/shared.bin", two / "lib/pkg/shared.bin")
    os.link(one / "lib/pkg/own.py", one / "lib/pkg/again.py")
    return {"one": one, "two": two}


def write_spec(folder: Path, tiers: dict[str, Path], **changes: Any) -> Path:
    """A spec over tiers on disk."""
    value: dict[str, Any] = {
        "name": "lab/quick", "tag": "t1", "epoch": 1_700_000_000, "base": {"scratch": True}, "prefix": "/opt/rt",
        "tiers": {name: {"path": str(path)} for name, path in tiers.items()}, **changes,
    }  # fmt: skip
    path = folder / "spec.json"
    path.write_text(json.dumps(value))
    return path


def build_small(folder: Path, **changes: Any) -> Built:
    """Build the small tiers into ``folder/out``."""
    spec = write_spec(folder, small_tiers(folder), **changes)
    made = build(spec, folder / "out", BuildOptions(folder / "cache", 2))
    return Built(folder / "out", spec, folder / "cache", dict(made.container))


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The small tiers on an empty base. Read only: tests copy what they change."""
    return build_small(tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="session")
def runnable(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The small tiers on this machine's own Python and shell, so that programs run in it. Read only."""
    return build_small(
        tmp_path_factory.mktemp("runnable"), name="lab/runnable", base={"host": True},
        env=["LAB=from the spec"], workdir="/opt/rt", labels={"lab.label": "kept"},
    )  # fmt: skip


@pytest.fixture
def needs() -> Callable[..., None]:
    """Skip unless programs are there (and, with ``root=True``, unless we are root)."""

    def check(*programs: str, root: bool = False) -> None:
        if root and os.geteuid() != 0:
            pytest.skip("needs root")
        absent = [p for p in programs if shutil.which(p) is None]
        if absent:
            pytest.skip(f"not installed: {', '.join(absent)}")

    return check
