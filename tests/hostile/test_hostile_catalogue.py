"""Every case of the catalogue on every way in: the stated code, or the stated tree; nothing beside it, in bounds."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hostile.cases import CASES, TARS, Case
from tests.hostile.exceptions import OPEN, OTHERWISE
from tests.hostile.verbs import VERBS, Codes, pulled, verify
from tests.lab.oracle import Victim, bounded
from tests.rootfs.test_apply_hostile import expected, seen

# Where a build or a registry takes its time, one form of each case is enough.
_ALL_FORMS = ("verify", "unpack")
_SECONDS = {"base": 6.0}


@pytest.fixture(autouse=True)
def _nobody_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    yield Victim(tmp_path / "stage")
    subprocess.run(["chmod", "-R", "u+rwx", str(tmp_path)], check=False)


def matrix() -> Iterator[object]:
    """Case and verb; cases whose verb is known to be wrong are expected to fail."""
    for case in CASES:
        for verb in (*VERBS, *(["pull"] if case.lab is not None else [])):
            reason = OPEN.get((case.id, verb))
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            group = "tar" if case in TARS else "image"
            yield pytest.param(case, verb, id=f"{group}-{case.id}-{verb}", marks=marks)


def wanted(case: Case, verb: str) -> Codes:
    """The codes of which one must be told; none where the case is accepted."""
    if (case.id, verb) in OTHERWISE:
        return OTHERWISE[case.id, verb][0]
    return frozenset({case.code} if case.code else ())


def forms(case: Case, verb: str) -> list[str]:
    names = list(case.shapes)
    return names if verb in _ALL_FORMS else [name for name in names if name == "oci-gzip"] or names[:1]


@pytest.mark.parametrize(("case", "verb"), list(matrix()))
def test_case(case: Case, verb: str, victim: Victim) -> None:
    codes = wanted(case, verb)
    if verb == "pull":
        check(case, codes, "registry", lambda: pulled(case.members(), victim.dest))
        return
    for form in forms(case, verb):
        archive = case.shapes[form](victim.folder)
        with bounded(_SECONDS.get(verb, 2.0)):
            check(case, codes, form, lambda archive=archive: VERBS[verb](archive, victim.dest))  # type: ignore[misc]
        if verb == "unpack" and not codes and case.tree is not None:
            if os.geteuid() != 0:  # a folder without permissions shows its owner nothing either
                subprocess.run(["chmod", "-R", "u+rwX", victim.dest], check=True)
            assert seen(victim.dest) == expected(case.tree), form
        victim.check()
        for path in (victim.dest, victim.folder / "archive.tar", victim.folder / "made"):
            remove(path)


def check(case: Case, codes: Codes, form: str, action: Callable[[], Codes]) -> None:
    found = action()
    if codes:
        assert found & codes, f"{case.title} as {form}: {sorted(found) or 'accepted'} instead of {sorted(codes)}"
    else:
        assert not found, f"{case.title} as {form}: refused with {sorted(found)}"


def remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        for folder, folders, _ in os.walk(path):
            for name in folders:
                if not os.path.islink(os.path.join(folder, name)):
                    os.chmod(os.path.join(folder, name), 0o700)
        shutil.rmtree(path)


def test_cases_have_unique_names_in_their_group() -> None:
    for group in (TARS, [case for case in CASES if case not in TARS]):
        names = [case.id for case in group]
        assert sorted(names) == sorted(set(names))


def test_exceptions_speak_of_cases() -> None:
    known = {case.id for case in CASES}
    for table in (OTHERWISE, OPEN):
        assert {key[0] for key in table} <= known
        assert {key[1] for key in table} <= {*VERBS, "pull"}
    assert OTHERWISE.keys().isdisjoint(OPEN)


@pytest.mark.parametrize("step", [511, 512, 513])
def test_c7_02_a_layer_cut_anywhere(step: int, tmp_path: Path) -> None:
    """At every block boundary, a byte before and behind, of a layer with all kinds of headers."""
    from tests.lab.archives import Lab, write
    from tests.lab.tarlang import file, folder, hardlink, long_name, pax, record, symlink, tar

    whole = tar(
        folder(b"d"), pax(record(b"path", b"d/p")), file(b"x", b"1" * 700), long_name(b"d/l\0"), file(b"y"),
        symlink(b"s", b"d"), hardlink(b"h", b"d/p"),
    )  # fmt: skip
    for cut in range(step, len(whole), 512):
        archive = write(tmp_path / "a.tar", Lab(layers=[whole[:cut]], pack="identity").oci())
        found = verify(archive, tmp_path / "dest")
        assert found & {"tar.truncated", "tar.trailing", "tar.pax"}, cut
