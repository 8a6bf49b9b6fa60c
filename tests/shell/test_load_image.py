"""load_image.sh: what counts is that the image is there, whatever the engine said (B015, B016, B017)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.interop.lab import HERE, short_folder

HELPER = Path(__file__).resolve().parents[2] / "layers/files/load_image.sh"
# An engine in a few lines: $MODE says how it behaves, what it holds lies in $HELD.
STUB = r"""#!/bin/bash
case "$1 $2" in
  "image inspect") [ -s "$HELD" ] && cat "$HELD" ;;
  "load "*)
    case "$MODE $#" in
      "plain-only 1") if [ "$(head -c 2 | od -An -tx1)" = " 1f 8b" ]; then exit 1; fi; echo "$ID" >"$HELD" ;;
      "plain-only 3") echo 'invalid tar header' >&2; exit 1 ;;
      "liar "*) cat >/dev/null </dev/null ;;
      "good "*) echo "$ID" >"$HELD" ;;
    esac ;;
esac
"""


def load(built: Built, place: Path, mode: str, image_id: str, *words: str) -> subprocess.CompletedProcess[str]:
    place.mkdir(exist_ok=True)
    (place / "docker").write_text(STUB)
    (place / "docker").chmod(0o755)
    env = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}", "MODE": mode, "ID": image_id, "HELD": str(place / "held")}
    return subprocess.run([HELPER, built.docker, *words], capture_output=True, text=True, env=env)


def classic(built: Built) -> str:
    return str(built.container["image_ids"]["classic"])


def test_a_good_engine(quick: Built, tmp_path: Path) -> None:
    done = load(quick, tmp_path, "good", classic(quick), "docker")
    assert (done.returncode, done.stdout.split()) == (0, ["lab/quick:t1", classic(quick)])


def test_an_engine_that_takes_no_gzip_gets_the_tar(quick: Built, tmp_path: Path) -> None:
    done = load(quick, tmp_path, "plain-only", classic(quick))
    assert (done.returncode, "decompressed" in done.stderr) == (0, True)


def test_an_engine_that_loads_nothing_and_ends_well(quick: Built, tmp_path: Path) -> None:
    assert load(quick, tmp_path, "liar", classic(quick)).returncode == 5


def test_another_image_under_the_name(quick: Built, tmp_path: Path) -> None:
    done = load(quick, tmp_path, "good", "sha256:" + "0" * 64)
    assert (done.returncode, "another image" in done.stderr) == (3, True)


@pytest.mark.parametrize("words", [(), ("/nowhere.tar.gz",), ("a", "b", "c")])
def test_wrong_arguments(words: tuple[str, ...]) -> None:
    assert subprocess.run([HELPER, *words], capture_output=True).returncode == 2


def test_an_archive_without_its_record(quick: Built, tmp_path: Path) -> None:
    shutil.copy(quick.docker, tmp_path)
    done = subprocess.run([HELPER, tmp_path / quick.docker.name], capture_output=True, text=True)
    assert (done.returncode, "container.json" in done.stderr) == (2, True)


@pytest.mark.interop
@pytest.mark.parametrize("archive", ["docker", "oci"])
def test_podman_itself(runnable: Built, tmp_path: Path, archive: str) -> None:
    if shutil.which("podman") is None or os.geteuid() != 0:
        pytest.skip("needs podman and root")
    path = runnable.docker if archive == "docker" else runnable.oci
    with short_folder() as folder:
        wrapper = tmp_path / "podman"
        storage = f"--root {folder}/root --runroot {folder}/run --storage-driver vfs"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("podman")} {storage} "$@"\n')
        wrapper.chmod(0o755)
        env = {**os.environ, **HERE.env}
        done = subprocess.run([HELPER, path, str(wrapper)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == classic(runnable).removeprefix("sha256:")


def test_another_shell_says_that_it_is_none() -> None:
    if shutil.which("dash") is None:
        pytest.skip("not installed: dash")
    done = subprocess.run(["dash", HELPER, "x"], capture_output=True, text=True)
    assert done.returncode == 2 and "this is a script for Bash" in done.stderr
