"""What cannot be read is ``io.error``: a writable place, of which ``io.readonly`` speaks, would be no help."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Built, small_tiers, write_spec

ROOT = Path(__file__).resolve().parents[2]
_WITHOUT = "-dac_override,-dac_read_search"
_CODE = """
import sys
from pathlib import Path
from oci_builder.build import BuildOptions, build
from oci_builder.model.errors import OciBuilderError
from oci_builder.readiness import ReadinessOptions, readiness
from oci_builder.release.files import read_file
from oci_builder.unpack import unpack_image
from oci_builder.verify import VerifyOptions, verify_archives
place = Path(sys.argv[2])
def verify(path):
    raise SystemExit(verify_archives([path], VerifyOptions()).findings[0].code)
verbs = {
    "verify": verify, "unpack": lambda p: unpack_image(p, p.parent / "unpacked"),
    "readiness": lambda p: readiness(p, ReadinessOptions()), "read": lambda p: read_file(p, 1000),
    "build": lambda p: build(p, p.parent / "out", BuildOptions(p.parent / "cache", 1)),
}
try:
    verbs[sys.argv[1]](place)
except OciBuilderError as error:
    raise SystemExit(error.code)
"""


def told(verb: str, path: Path) -> str:
    """The code that a verb ends with, as a user who may not read everything."""
    argv: list[str | Path] = [sys.executable, "-c", _CODE, verb, path]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv: root reads everything")
        argv = ["setpriv", f"--bounding-set={_WITHOUT}", f"--inh-caps={_WITHOUT}", *argv]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    return done.stderr.strip()


@pytest.mark.parametrize("verb", ["verify", "unpack", "readiness", "read"])
def test_an_archive_that_cannot_be_read(quick: Built, tmp_path: Path, verb: str) -> None:
    archive = tmp_path / "runtime.oci.tar"
    shutil.copyfile(quick.oci, archive)
    archive.chmod(0)
    assert told(verb, archive) == "io.error"
    assert not (tmp_path / "unpacked").exists()


@pytest.mark.parametrize("closed", ["envs/one", "envs/one/lib/pkg/own.py", "base.tar"])
def test_a_build_whose_inputs_cannot_be_read(quick: Built, tmp_path: Path, closed: str) -> None:
    shutil.copyfile(quick.oci, tmp_path / "base.tar")
    spec = write_spec(tmp_path, small_tiers(tmp_path), base={"oci": str(tmp_path / "base.tar")})
    (tmp_path / closed).chmod(0)
    try:
        assert told("build", spec) == "io.error"
    finally:
        (tmp_path / closed).chmod(0o755)


def test_a_place_that_cannot_be_written_is_still_called_so(quick: Built, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    shutil.copyfile(quick.oci, tmp_path / "closed/runtime.oci.tar")
    (tmp_path / "closed").chmod(0o500)
    assert told("unpack", tmp_path / "closed/runtime.oci.tar") == "io.readonly"
