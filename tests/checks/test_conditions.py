"""Conditions that a check proves before it may pass: network, caches, GPUs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from checks_lab import FILES, fake_driver, run_check
from nrl_checks import conditions, gpu, imports
from nrl_checks.common import Result


@pytest.mark.parametrize("check", ["jit", "training", "nccl", "generation", "operators --tier vllm --inventory none"])
def test_without_a_driver_a_gpu_check_fails(check: str) -> None:
    status, result = run_check(*check.split(), NRL_CHECK_LIBCUDA="/nonexistent/libcuda.so.1")
    assert status == 1
    assert result["outcome"] == "fail"
    assert "no GPU" in result["reason"]


@pytest.mark.parametrize("check", ["jit", "training", "generation"])
def test_a_check_leaves_no_folder(tmp_path: Path, check: str) -> None:
    """On a bare host every run would add to /tmp."""
    run_check(check, NRL_CHECK_LIBCUDA="/nonexistent/libcuda.so.1", TMPDIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_zero_gpus_is_a_failure(tmp_path: Path) -> None:
    status, result = run_check("training", NRL_CHECK_LIBCUDA=str(fake_driver(tmp_path)), FAKE_GPUS="0")
    assert (status, result["outcome"]) == (1, "fail")
    assert "zero devices" in result["reason"]


def test_an_absent_package_is_a_failure_with_its_name(tmp_path: Path) -> None:
    status, result = run_check("training", NRL_CHECK_LIBCUDA=str(fake_driver(tmp_path)), FAKE_GPUS="1")
    assert status == 1
    assert "torch is absent" in result["reason"]


@pytest.mark.parametrize(("count", "atleast"), [("1", "2"), ("2", "8"), ("7", "8")])
def test_nccl_with_too_few_gpus_fails(tmp_path: Path, count: str, atleast: str) -> None:
    """One rank has nothing to exchange, and seven do not meet a gate of eight."""
    library = str(fake_driver(tmp_path))
    status, result = run_check("nccl", "--at-least", atleast, NRL_CHECK_LIBCUDA=library, FAKE_GPUS=count)
    assert status == 1
    assert f"{count} GPUs, {atleast} wanted" in result["reason"]


def test_one_rank_fails_even_when_it_is_asked_for(tmp_path: Path) -> None:
    library = str(fake_driver(tmp_path))
    argv = ("nccl", "--ranks", "1", "--at-least", "1")
    status, result = run_check(*argv, NRL_CHECK_LIBCUDA=library, FAKE_GPUS="8")
    assert (status, result["outcome"]) == (1, "fail")
    assert "1 ranks" in result["reason"]


def test_two_devices_with_one_uuid_fail(tmp_path: Path) -> None:
    library = str(fake_driver(tmp_path))
    _, result = run_check("training", NRL_CHECK_LIBCUDA=library, FAKE_GPUS="2", FAKE_TWINS="1")
    assert "one UUID" in result["reason"]


def test_a_driver_that_does_not_come_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUINIT", "802")
    with pytest.raises(gpu.NoGpu, match="fabric is not ready"):
        gpu.gpu_facts(str(fake_driver(tmp_path)))


def test_facts_of_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", "2")
    found = gpu.gpu_facts(str(fake_driver(tmp_path)))["gpus"]
    assert [g["capability"] for g in found] == ["10.0", "10.0"]
    assert found[1]["uuid"] == "GPU-00000000-0000-0000-0000-000000000002"


def test_a_namespace_of_its_own_blocks_the_network() -> None:
    status, result = run_check("network-blocked")
    assert (status, result["outcome"]) == (0, "pass"), result


@pytest.mark.parametrize("answer", [0, errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EAGAIN])
def test_an_answer_or_silence_is_no_proof_of_a_blocked_network(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    monkeypatch.setattr(conditions, "interfaces_up", lambda: ["lo"])
    monkeypatch.setattr(conditions, "resolves", lambda name: False)
    monkeypatch.setattr(conditions, "reach", lambda family, address: answer)
    result = Result()
    conditions.network(result)
    assert result.outcome == "fail"


def test_another_interface_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "interfaces_up", lambda: ["eth0", "lo"])
    monkeypatch.setattr(conditions, "reach", lambda family, address: errno.ENETUNREACH)
    monkeypatch.setattr(conditions, "resolves", lambda name: False)
    result = Result()
    conditions.network(result)
    assert result.outcome == "fail"


def test_a_file_in_a_cache_fails(tmp_path: Path) -> None:
    (tmp_path / "triton/ab").mkdir(parents=True)
    assert run_check("caches-empty", isolated=False, TRITON_CACHE_DIR=str(tmp_path))[0] == 0
    (tmp_path / "triton/ab/k.cubin").write_bytes(b"")
    status, result = run_check("caches-empty", isolated=False, TRITON_CACHE_DIR=str(tmp_path))
    assert (status, result["outcome"]) == (1, "fail")


def test_a_file_in_the_home_s_cache_fails(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/x").write_bytes(b"")
    assert run_check("caches-empty", isolated=False, HOME=str(tmp_path))[0] == 1


def test_a_cache_that_another_variable_names_is_looked_at_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of HF_HOME and HF_HUB_CACHE the second wins: what it leads to would be used, whatever HF_HOME is."""
    (tmp_path / "model").write_bytes(b"")
    status, found = run_check("caches-empty", isolated=False, HF_HUB_CACHE=str(tmp_path))
    assert (status, str(tmp_path) in found["reason"]) == (1, True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    conditions.caches(Result())
    assert "HF_HUB_CACHE" not in os.environ


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_a_cache_that_cannot_be_looked_into_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    if (child := os.fork()) == 0:
        os.setresuid(65534, 65534, 65534)
        os._exit(0 if conditions.first_file(Path("closed")) == "closed" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_cache_that_is_a_file_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert conditions.first_file(tmp_path / "file")
    assert conditions.first_file(tmp_path / "absent") == ""


def test_an_open_network_fails_the_import_of_a_module_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check proves its own conditions, these small ones too."""
    monkeypatch.setenv("FAKE_GPUS", "1")
    monkeypatch.setenv("NRL_CHECK_LIBCUDA", str(fake_driver(tmp_path)))
    monkeypatch.setattr(conditions, "interfaces_up", lambda: ["eth0", "lo"])
    assert "interfaces besides loopback" in "; ".join(imports.driver_linked("json", gpu=True).reasons)


def test_check_runtime_hands_on_none_of_a_user_s_own_caches() -> None:
    """They would fail every check that it runs on a workstation."""
    text = (FILES / "runtime_check/shipped.py").read_text()
    assert all(f'"{name}"' in text for name in conditions.OVERRIDES)


def test_a_home_that_is_no_folder_holds_no_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Service accounts have /dev/null for one."""
    for name in (*conditions.CACHES, *conditions.OVERRIDES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    result = Result()
    conditions.caches(result)
    assert result.reasons == []


def test_a_cluster_s_interfaces_and_addresses_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL and gloo insist on the interface that such a variable names, and it is not here."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "bond0")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    result = Result()
    conditions.network(result)
    assert result.details["dropped"] == ["NCCL_SOCKET_IFNAME", "RAY_ADDRESS"]
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
