"""Fixtures of the interop tests: Debian's own programs, and current ones from Debian unstable."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.interop.lab import SCRIPT, Docker, Programs, docker_engine, missing, plain_copy
from tests.lab.debian_roots import lab_folder, made


def need(*programs: str) -> None:
    """Skip without root or one of the programs."""
    if os.geteuid() != 0:
        pytest.skip("real container programs need root here")
    if absent := missing(programs):
        pytest.skip(f"not installed: {', '.join(absent)} (scripts/setup.sh installs them as root)")


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """This machine's programs, told to do without systemd."""
    need()
    config = tmp_path_factory.mktemp("containers") / "containers.conf"
    config.write_text('[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\n')
    return Programs(env={"CONTAINERS_CONF": str(config)})


@pytest.fixture(scope="session")
def modern() -> Programs:
    """Current programs, in a folder made once from this machine's own Debian mirror."""
    need("mmdebstrap", "unshare")
    root = lab_folder() / "clients"
    made([SCRIPT, "make", root], "current clients")
    return Programs((str(SCRIPT), "run", str(root)), {"TMPDIR": tempfile.gettempdir()})


@pytest.fixture(scope="module")
def engine(debian: Programs) -> Iterator[Docker]:
    """Debian's Docker Engine."""
    need("dockerd", "docker")
    with docker_engine(debian) as docker:
        yield docker


@pytest.fixture(scope="session")
def plain_docker(runnable: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Docker archive, uncompressed."""
    return plain_copy(runnable.docker, tmp_path_factory.mktemp("plain"))
