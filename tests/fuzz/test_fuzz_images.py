"""Whole images with changes at random: verify, unpack and inspect judge alike, and the victim stays unharmed.

Documents are changed as JSON and keep right digests above them, layers as tars with right checksums: so the change gets
as far as a digest can let it. ``OCI_BUILDER_SOAK=SECONDS`` goes on from a new seed.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.corpus import mutations
from tests.hostile.verbs import ACCEPTED, inspect, unpack, verify
from tests.lab.archives import Lab, files, write
from tests.lab.oracle import Victim, within

ROUNDS = 400
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 1.5, "", "x", "..", "/", "\0", "sha256:", "sha256:" + "0" * 64,
    [], {}, [[]], [None], {"": ""}, "linux", "amd64", "arm64", "application/json", "\N{ARABIC-INDIC DIGIT FOUR}",
    "application/vnd.oci.image.layer.v1.tar", "application/vnd.oci.image.index.v1+json", "layers", "a" * 5000,
)  # fmt: skip


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [pair for key in keys for pair in [(value, key), *nodes(value[key])]]


def changer(rnd: random.Random) -> Callable[[Any], Any]:
    """A change of a document."""

    def change(value: Any) -> Any:
        value = copy.deepcopy(value)
        for _ in range(rnd.choice((1, 1, 2))):
            places = nodes(value)
            if not places:
                break
            at, key = rnd.choice(places)
            match rnd.randrange(6):
                case 0:
                    del at[key]
                case 1 if isinstance(at, list):
                    at.append(copy.deepcopy(at[key]))
                case 2 if isinstance(at, dict):
                    at[rnd.choice(("x", str(key).swapcase(), "layers", "manifests", "config"))] = copy.deepcopy(at[key])
                case 3:
                    at[key] = copy.deepcopy(rnd.choice(places)[0])
                case _:
                    at[key] = copy.deepcopy(rnd.choice(VALUES))
        return value

    return change


def documents(seed: int) -> Iterator[Lab]:
    """Images one of whose documents is changed."""
    rnd = random.Random(f"documents {seed}")
    while True:
        where = rnd.choice(("edit_config", "edit_manifest", "edit_descriptor", "edit_index", "edit_docker"))
        pack = rnd.choice(("gzip", "identity", "zstd"))
        yield Lab(layers=[files(a=b"a"), files(b=b"b")], pack=pack, **{where: changer(rnd)})


def layers(seed: int) -> Iterator[Lab]:
    """Images one of whose layers is changed, above or below an honest one."""
    rnd, made = random.Random(f"layers {seed}"), mutations("tar", seed)
    honest = files(**{"d/f": b"1", "l": b"2"})
    while True:
        odd = next(made)
        yield Lab(layers=rnd.choice(([odd], [honest, odd], [odd, honest])), pack=rnd.choice(("gzip", "identity")))


SOURCES = {"documents": documents, "layers": layers}


def judge(lab: Lab, folder: Path, note: str) -> None:
    """All verbs alike, quickly, and the victim's folder untouched."""
    victim = Victim(folder)
    try:
        with within(5):
            archive = write(folder / "archive.tar", lab.oci())
            found = {"verify": verify(archive, victim.dest), "unpack": unpack(archive, victim.dest)}
            found["inspect"] = inspect(archive, victim.dest)
        assert len({codes == ACCEPTED for codes in found.values()}) == 1, f"{note}: {found}"
        victim.check()
    finally:
        subprocess.run(["chmod", "-R", "u+rwx", folder], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("source", SOURCES)
def test_changed_images(source: str, tmp_path: Path) -> None:
    for number, lab in enumerate(islice(SOURCES[source](1), ROUNDS)):
        judge(lab, tmp_path / str(number), f"{source} {number} of seed 1")


@pytest.mark.soak
@pytest.mark.parametrize("source", SOURCES)
def test_changed_images_for_long(source: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("OCI_BUILDER_SEED", time.time_ns() % 10**9))
    until = time.monotonic() + float(os.environ.get("OCI_BUILDER_SOAK", "60"))
    for number, lab in zip(count(), SOURCES[source](seed), strict=False):
        judge(lab, tmp_path / str(number), f"{source} {number} of OCI_BUILDER_SEED={seed}")
        if time.monotonic() > until:
            break
