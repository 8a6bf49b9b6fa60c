"""Our own two archives: the strict profile, the twin proof, and that no bit of them is left unchecked."""

from __future__ import annotations

import gzip
import hashlib
import random
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from oci_builder.judge.layer import read_layer
from oci_builder.model.report import Report
from oci_builder.store.blobs import DirStore
from oci_builder.verify import VerifyOptions, verify_archives
from tests.lab.archives import Lab, files, write
from tests.lab.ours import our_image, our_layer, write_pair


@dataclass
class Pair:
    oci: Path
    docker: Path
    folder: Path
    store: DirStore

    def both(self, **options: object) -> Report:
        return verify_archives([self.oci, self.docker], VerifyOptions(**options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("ours")
    with DirStore(folder / "store") as store:
        oci, docker = write_pair(folder, our_image(store), store)
        yield Pair(oci, docker, folder, store)


@pytest.mark.parametrize("profile", ["foreign", "strict"])
def test_our_archives_are_good_alone_and_together(pair: Pair, profile: str) -> None:
    options = VerifyOptions(profile)
    for paths in ([pair.oci], [pair.docker], [pair.oci, pair.docker], [pair.docker, pair.oci]):
        assert verify_archives(paths, options).findings == ()


def test_the_subjects_are_bound_to_the_bytes(pair: Pair) -> None:
    subjects = pair.both().subjects
    for path, subject in zip((pair.oci, pair.docker), subjects, strict=True):
        assert subject["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert subject["size"] == path.stat().st_size
    assert [subject["kind"] for subject in subjects] == ["oci-archive", "docker-archive"]
    assert subjects[0]["config"] == subjects[1]["config"]


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_the_fast_proof_and_the_slow_one_give_the_same_report(pair: Pair, threads: int) -> None:
    assert pair.both(threads=threads) == pair.both(threads=1, shortcut=False)


def test_the_fast_proof_inflates_no_layer_a_second_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def spy(chunks: Any, where: str, *rest: Any) -> Any:
        read.append(where)
        return read_layer(chunks, where, *rest)

    monkeypatch.setattr("oci_builder.judge.contents.read_layer", spy)
    assert pair.both().ok
    assert read and all(where.startswith(str(pair.oci)) for where in read)


def test_both_proofs_agree_on_damaged_archives(pair: Pair, tmp_path: Path) -> None:
    rnd, data = random.Random(11), pair.docker.read_bytes()
    for _ in range(25):
        bad = bytearray(data)
        bad[rnd.randrange(len(bad))] ^= 1 << rnd.randrange(8)
        (tmp_path / "d").write_bytes(bad)
        fast, slow = (
            verify_archives([pair.oci, tmp_path / "d"], VerifyOptions(shortcut=shortcut)) for shortcut in (True, False)
        )
        assert {f.code for f in fast.errors} == {f.code for f in slow.errors}


@pytest.mark.parametrize("which", ["oci", "docker"])
def test_every_single_bit_is_covered(pair: Pair, which: str, tmp_path: Path) -> None:
    """Random bits of either archive, and each byte of its first and last kilobytes, where headers and padding are."""
    rnd, data = random.Random(13), (pair.oci if which == "oci" else pair.docker).read_bytes()
    edges = [*range(0, 1100, 29), *range(len(data) - 1100, len(data), 29)]
    for at in [*edges, *(rnd.randrange(len(data)) for _ in range(80))]:
        bad = bytearray(data)
        bad[at] ^= 1 << rnd.randrange(8)
        (tmp_path / "bad").write_bytes(bad)
        paths = [tmp_path / "bad", pair.docker] if which == "oci" else [pair.oci, tmp_path / "bad"]
        assert not verify_archives(paths).ok, f"a flip at byte {at} went unseen"


@pytest.mark.parametrize("which", ["oci", "docker"])
def test_headers_of_gzip_members_and_documents_are_covered_bit_by_bit(pair: Pair, which: str, tmp_path: Path) -> None:
    """Where no digest and no CRC reaches: gzip times and OS bytes, index.json, manifest.json, a base's gzip name."""
    rnd, data = random.Random(17), (pair.oci if which == "oci" else pair.docker).read_bytes()
    spots = [at + n for at in range(len(data) - 20) if data[at : at + 3] == b"\x1f\x8b\x08" for n in range(4, 20)]
    for name in (b'"manifests"', b'"RepoTags"', b"imageLayoutVersion"):
        at = data.find(name)
        spots += range(at - 40, at + 200, 3) if at > 0 else []
    for at in rnd.sample(spots, min(len(spots), 160)):
        bad = bytearray(data)
        bad[at] ^= 2
        (tmp_path / "bad").write_bytes(bad)
        paths = [tmp_path / "bad", pair.docker] if which == "oci" else [pair.oci, tmp_path / "bad"]
        assert not verify_archives(paths).ok, f"a flip at byte {at} went unseen"


def test_c10_08_other_images_are_no_twins(pair: Pair, tmp_path: Path) -> None:
    image = our_image(pair.store)
    a, b, c, d = image.layers
    others = {
        "order": replace(image, layers=(a, c, b, d)),
        "one layer": replace(image, layers=(a, b, c, our_layer(pair.store, "other", (5,)))),
        "env": our_image(pair.store, config={"Env": ["PATH=/bin"]}),
    }
    for what, other in others.items():
        (tmp_path / what).mkdir()
        _, docker = write_pair(tmp_path / what, other, pair.store)
        report = verify_archives([pair.oci, docker])
        assert report.exit_status == 1, what
        assert {f.code for f in report.errors} == {"archive.twin"}, what
        assert verify_archives([docker]).ok


def test_an_archive_of_ours_that_somebody_compressed_anew_is_still_a_twin(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "again.tar.gz").write_bytes(gzip.compress(gzip.decompress(pair.docker.read_bytes()), 1))
    assert verify_archives([pair.oci, tmp_path / "again.tar.gz"]).ok


def test_foreign_twins(tmp_path: Path) -> None:
    oci = write(tmp_path / "a.tar", Lab(pack="zstd").oci())
    docker = write(tmp_path / "b.tar", Lab(pack="identity").docker())
    assert verify_archives([oci, docker]).ok
    other = write(tmp_path / "c.tar", Lab(layers=[files(c=b"c")]).docker())
    assert verify_archives([oci, other]).exit_status == 1


def test_a_layer_of_the_first_in_a_place_where_no_layer_is(pair: Pair, tmp_path: Path) -> None:
    """The shared bytes stand before the tar: the fast way must fall back, and find that this is no archive."""
    image = our_image(pair.store)
    blob = pair.store.path(image.layers[1].descriptor.id).read_bytes()
    (tmp_path / "odd").write_bytes(blob + pair.docker.read_bytes())
    fast, slow = (
        verify_archives([pair.oci, tmp_path / "odd"], VerifyOptions(shortcut=shortcut)) for shortcut in (True, False)
    )
    assert fast == slow and not fast.ok


@pytest.mark.slow
def test_b210_memory_does_not_grow_with_the_archive(tmp_path: Path) -> None:
    with DirStore(tmp_path / "store") as store:
        image = our_image(store)
        sizes = (1_000_000,) * 300
        image = replace(image, layers=(image.layers[0], our_layer(store, "big", sizes)))
        pair = write_pair(tmp_path, image, store)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert verify_archives(list(pair)).ok
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10
