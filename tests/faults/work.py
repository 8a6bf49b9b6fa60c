"""The four verbs on small inputs, each with the judgement of what may stand there at any moment."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oci_builder.build import FILES
from oci_builder.model.digest import Digest
from tests.conftest import Built, small_tiers, write_spec
from tests.faults.lab import Ran, Zygote
from tests.lab.images import SmallImage, small_image
from tests.lab.oracle import differences, tree
from tests.lab.registry import Registry


@dataclass
class Work:
    """One verb on fresh folders.

    Attributes:
        folder: all that the run may write lies in it.
        argv: the command line.
        good: what the finished result must be; filled in by the first whole run.
    """

    folder: Path
    good: Any = field(default=None, init=False)

    @property
    def argv(self) -> list[object]:
        raise NotImplementedError

    def never_partial(self) -> None:
        """Nothing that looks finished is not."""
        raise NotImplementedError

    def result(self) -> Any:
        """What stands there, as a value that two equal results share."""
        raise NotImplementedError

    def leftovers(self) -> list[str]:
        """What an unfinished run left and a finished one must have cleared away."""
        raise NotImplementedError

    def unmake_whole(self) -> None:
        """Where a whole result would stand in the way of the next run, remove it."""

    def finish(self, zygote: Zygote) -> Ran:
        """A run without harm succeeds, gives the same bytes each time, and clears up."""
        ran = zygote.run(*self.argv)
        assert ran.status == 0, ran.text
        unchanged = "nothing has changed" in ran.text
        result = self.result()
        self.good = self.good or result
        assert result == self.good
        self.never_partial()
        # A run that has nothing to do clears nothing away either.
        assert unchanged or self.leftovers() == []
        return ran


@dataclass
class Build(Work):
    """build of small tiers."""

    spec: Path

    @property
    def argv(self) -> list[object]:
        out, cache = self.folder / "out", self.folder / "cache"
        return ["build", self.spec, "--out", out, "--cache", cache, "--jobs", 2]

    def _present(self) -> dict[str, str]:
        out = self.folder / "out"
        return {name: Digest.of((out / name).read_bytes()) for name in FILES if (out / name).exists()}

    def never_partial(self) -> None:
        present = self._present()
        assert present.items() <= self.good.items()
        blobs = self.folder / "cache" / "store" / "blobs" / "sha256"
        for blob in blobs.iterdir() if blobs.exists() else ():
            assert Digest.of(blob.read_bytes()).hex == blob.name
        if {"container.json", "portable.json"} & present.keys():
            assert len(present) >= 4, "a record stands without its archives"

    def result(self) -> dict[str, str]:
        return self._present()

    def leftovers(self) -> list[str]:
        out = [name for name in os.listdir(self.folder / "out") if name not in FILES]
        return out + os.listdir(self.folder / "cache" / "store" / "ingest")


@dataclass
class Unpack(Work):
    """unpack of a built archive."""

    archive: Path

    @property
    def argv(self) -> list[object]:
        return ["unpack", self.archive, self.folder / "dest"]

    def never_partial(self) -> None:
        dest = self.folder / "dest"
        assert not dest.exists() or differences(self.good, tree(dest)) == []

    def result(self) -> Any:
        return tree(self.folder / "dest")

    def leftovers(self) -> list[str]:
        return [name for name in os.listdir(self.folder) if name != "dest"]

    def unmake_whole(self) -> None:
        subprocess.run(["rm", "-rf", str(self.folder / "dest")], check=True)


@dataclass
class Pull(Work):
    """pull of an image from a registry."""

    reference: str

    @property
    def argv(self) -> list[object]:
        return ["pull", self.reference, self.folder / "dest"]

    def never_partial(self) -> None:
        dest = self.folder / "dest"
        blobs = dest / "blobs" / "sha256"
        for blob in blobs.iterdir() if blobs.exists() else ():
            assert Digest.of(blob.read_bytes()).hex == blob.name
        if (dest / "index.json").exists():
            assert self._files(dest) == self.good

    def _files(self, dest: Path) -> dict[str, str]:
        files = [p for p in dest.rglob("*") if p.is_file() and p.relative_to(dest).parts[0][0] != "."]
        return {str(p.relative_to(dest)): Digest.of(p.read_bytes()) for p in files}

    def result(self) -> Any:
        return self._files(self.folder / "dest")

    def leftovers(self) -> list[str]:
        return sorted(set(os.listdir(self.folder / "dest")) - {"blobs", "index.json", "oci-layout"})


@dataclass
class Verify(Work):
    """verify of both archives, with a report."""

    archives: tuple[Path, Path]

    @property
    def argv(self) -> list[object]:
        return ["verify", *self.archives, "--json", self.folder / "report.json"]

    def never_partial(self) -> None:
        report = self.folder / "report.json"
        if report.exists():
            value = json.loads(report.read_bytes())
            assert value == self.good or not value["ok"]

    def result(self) -> Any:
        return json.loads((self.folder / "report.json").read_bytes())

    def leftovers(self) -> list[str]:
        return []


class Bench:
    """Makes works of each kind in fresh folders."""

    def __init__(self, folder: Path, built: Built, registry: Registry) -> None:
        self.folder, self.built = folder, built
        self.image: SmallImage = small_image(3, size=60_000)
        self.reference = f"{registry.host}/lab/app:v1@{self.image.publish(registry, 'lab/app')}"
        (folder / "source").mkdir()
        self.spec = write_spec(folder / "source", small_tiers(folder / "source"))
        self._count = 0

    def work(self, verb: str) -> Work:
        """A fresh one."""
        self._count += 1
        folder = self.folder / f"{verb}-{self._count}"
        folder.mkdir()
        match verb:
            case "build":
                return Build(folder, self.spec)
            case "unpack":
                return Unpack(folder, self.built.oci)
            case "pull":
                return Pull(folder, self.reference)
        return Verify(folder, (self.built.oci, self.built.docker))


VERBS = ("build", "unpack", "pull", "verify")
