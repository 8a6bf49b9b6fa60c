"""What LocalRunner enforces or refuses: GPUs, network, disk (issue 8, item 5)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chroot_exec import syscalls
from oci_builder.engines.local_limits import find_gpus, leave_network, require_gpus, require_scratch
from oci_builder.engines.needs import Needs
from oci_builder.model.errors import OciBuilderError, PolicyError
from oci_builder.model.events import Event, silent

ONE = Needs("check-u22", 1, 1024, 1, 60, gpu="B200")
EIGHT = Needs("check-u22", 1, 1024, 1, 60, gpu="B200:8")


DRIVER = """
#include <string.h>
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *t, int n, int d) { strncpy(t, "NVIDIA B200", n); return 0; }
int cuDeviceGetUuid(unsigned char *u, int d) { memset(u, 0, 16); u[15] = d + 1; return 0; }
int cuDeviceGetPCIBusId(char *t, int n, int d) { strncpy(t, "0000:01:00.0", n); return 0; }
int cuDeviceTotalMem_v2(unsigned long *m, int d) { *m = 1UL << 34; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 10 : 0; return 0; }
"""


def driver(folder: Path, code: str) -> dict[str, str]:
    """The environment of a machine with a CUDA driver of our own making."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (folder / "cuda.c").write_text(code)
    command = [compiler, "-shared", "-fPIC", "-w", folder / "cuda.c", "-o", folder / "libcuda.so.1"]
    subprocess.run(command, check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def gpu(number: int, name: str = "NVIDIA B200") -> dict[str, object]:
    return {"name": name, "uuid": f"GPU-{number}", "capability": "10.0"}


def test_no_gpu_is_a_refusal() -> None:
    with pytest.raises(PolicyError) as caught:
        require_gpus(ONE, (), False, silent)
    assert (caught.value.code, caught.value.exit_status) == ("needs.gpu", 4)


def test_too_few_gpus_are_a_refusal_whatever_is_allowed() -> None:
    with pytest.raises(PolicyError) as caught:
        require_gpus(EIGHT, tuple(gpu(i) for i in range(7)), True, silent)
    assert caught.value.code == "needs.gpu"


def test_one_gpu_told_eight_times_is_one() -> None:
    with pytest.raises(PolicyError):
        require_gpus(EIGHT, tuple(gpu(0) for _ in range(8)), False, silent)


def test_enough_gpus_of_the_right_kind() -> None:
    seen = list[Event]()
    require_gpus(EIGHT, tuple(gpu(i) for i in range(8)), False, seen.append)
    assert not seen


def test_another_kind_is_refused_unless_it_was_asked_for() -> None:
    other, seen = (gpu(0, "NVIDIA H200"),), list[Event]()
    with pytest.raises(PolicyError) as caught:
        require_gpus(ONE, other, False, silent)
    assert caught.value.code == "needs.gpu"
    require_gpus(ONE, other, True, seen.append)
    assert [e.kind for e in seen] == ["warning"]
    assert "meets no B200 gate" in seen[0].message


def test_a_mixed_machine_is_another_kind() -> None:
    with pytest.raises(PolicyError):
        require_gpus(ONE, (gpu(0), gpu(1, "NVIDIA H200")), False, silent)


def test_the_driver_is_asked(tmp_path: Path) -> None:
    found = find_gpus(driver(tmp_path, DRIVER))
    assert [(g["name"], g["capability"]) for g in found] == [("NVIDIA B200", "10.0")] * 2
    require_gpus(ONE, found, False, silent)


def test_a_driver_that_crashes_gives_none(tmp_path: Path) -> None:
    assert find_gpus(driver(tmp_path, "int cuInit(int f) { return *(volatile int *)0; }")) == ()


def test_room_is_asked_for_before(tmp_path: Path) -> None:
    require_scratch(tmp_path / "new", 0)
    with pytest.raises(OciBuilderError) as caught:
        require_scratch(tmp_path, 1e9)
    assert caught.value.code == "io.space"


PROBE = """
import errno, socket, sys
from oci_builder.engines.local_limits import interfaces, leave_network
leave_network()
s = socket.socket()
s.settimeout(2)
assert s.connect_ex(("192.0.2.1", 80)) == errno.ENETUNREACH, "the network is not blocked"
assert s.connect_ex(("127.0.0.1", int(sys.argv[1]))) == errno.ECONNREFUSED, "the host's loopback is in reach"
inner = socket.create_server(("127.0.0.1", 0))
socket.create_connection(inner.getsockname()).close()
assert interfaces() == ["lo"]
import os
print(os.getuid(), open("/proc/self/uid_map").read().split())
"""


def run_probe(*prefix: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [*prefix, sys.executable, "-c", PROBE, str(server.getsockname()[1])]
        env = {**os.environ, "PYTHONPATH": str(root)}
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=root)


def test_there_is_no_network_but_a_loopback_of_its_own() -> None:
    done = run_probe()
    if "needs.network" in done.stderr:
        pytest.skip("needs network namespaces")
    assert done.returncode == 0, done.stderr


def test_an_ordinary_user_keeps_its_id(needs) -> None:  # type: ignore[no-untyped-def]
    needs("setpriv", root=True)
    done = run_probe("setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups")
    if "needs.network" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("this user may not make namespaces, or not read the project")
    assert done.stdout.split()[:1] == ["1000"], done.stderr


def test_where_namespaces_are_forbidden_the_stage_is_refused(needs) -> None:  # type: ignore[no-untyped-def]
    """The prefix takes CAP_SYS_ADMIN from root, as a container does."""
    needs("setpriv", root=True)
    done = run_probe("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin")
    assert done.returncode != 0
    assert "needs.network" in done.stderr


def in_namespace_without_more(check: Callable[[], bool]) -> int:
    """Exit status of a child that is user 1000 of a user namespace in which no other may be made: 0 where ``check``."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            Path("/proc/sys/user/max_user_namespaces").write_text("0")
            os.setgroups([])
            os.setresgid(1000, 1000, 1000)
            os.setresuid(1000, 1000, 1000)
            status = 0 if check() else 1
        finally:
            os._exit(status)
    os.close(ready[1])
    if not os.read(ready[0], 1):
        os.waitpid(pid, 0)
        pytest.skip("needs user namespaces")
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text("0 0 65536")
    os.write(go[1], b"x")
    for fd in (ready[0], *go):
        os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_an_ordinary_user_who_may_make_no_namespaces_is_refused(needs) -> None:  # type: ignore[no-untyped-def]
    """It does not run with the network instead."""
    needs(root=True)

    def refused() -> bool:
        try:
            leave_network()
        except PolicyError as error:
            return error.code == "needs.network" and "max_" in error.message and "No space" not in error.message
        return False

    assert in_namespace_without_more(refused) == 0
