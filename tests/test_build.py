"""The build as a whole: the same bytes whatever the circumstances, nothing done twice, nothing half done.

C12-01; field reports of groups G (reproducibility) and H (memory, concurrency). Builds run in processes of their own,
through the command line, as people's do.
"""

from __future__ import annotations

import concurrent.futures
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from oci_builder.build import FILES, MOST_THREADS, BuildOptions, build
from oci_builder.model.errors import OciBuilderError
from oci_builder.model.events import Event
from oci_builder.rootfs import host
from oci_builder.verify import VerifyOptions, verify_archives
from tests.conftest import Built, build_small, small_tiers, write_spec

ROOT = Path(__file__).resolve().parent.parent


# With TRACE set, every path that Python opens is written there, one a line.
START = """
import os, sys
if os.environ.get("TRACE"):
    log = os.open(os.environ["TRACE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.addaudithook(lambda name, args: os.write(log, b"%r\\n" % (args[0],)) if name == "open" else None)
from oci_builder.cli import main
sys.exit(main())
"""


def command(spec: Path, out: Path, cache: Path, *options: str) -> list[str]:
    """The build's command line, in this interpreter."""
    return [sys.executable, "-c", START, "build", str(spec), "--out", str(out), "--cache", str(cache), *options]


def run(spec: Path, out: Path, cache: Path, *options: str, cwd: Path = ROOT, **env: str) -> dict[str, Any]:
    """Build to the end; its JSON result."""
    done = subprocess.run(
        command(spec, out, cache, "--json", *options), capture_output=True, cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def digests(out: Path) -> dict[str, str]:
    """Name -> SHA-256 of the five files."""
    return {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in FILES}


def copy_in_order(source: Path, target: Path, seed: int) -> None:
    """Copy a tree, its names made in a shuffled order (a folder's own order follows the order of creation)."""
    paths = [p for p in source.rglob("*") if not p.is_dir() or p.is_symlink()]
    for folder in (p for p in source.rglob("*") if p.is_dir() and not p.is_symlink()):
        (target / folder.relative_to(source)).mkdir(parents=True, exist_ok=True)
    made: dict[tuple[int, int], Path] = {}
    random.Random(seed).shuffle(paths)
    for path in paths:
        to, stat = target / path.relative_to(source), path.lstat()
        if path.is_symlink():
            to.symlink_to(path.readlink())
        elif (first := made.get((stat.st_dev, stat.st_ino))) is not None:
            os.link(first, to)
        else:
            shutil.copy2(path, to)
            made[stat.st_dev, stat.st_ino] = to


CIRCUMSTANCES = {
    "another folder": {"cwd": "/"},
    "another time zone": {"TZ": "Pacific/Kiritimati"},
    "another locale": {"LC_ALL": "C", "LANG": "de_DE.UTF-8", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "another hash seed": {"PYTHONHASHSEED": "4242"},
    "a later day": {"SOURCE_DATE_EPOCH": "1900000000"},
    "optimised Python": {"PYTHONOPTIMIZE": "2"},
    "another home and user": {"HOME": "/nonexistent", "USER": "somebody", "LOGNAME": "somebody"},
}  # fmt: skip


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_the_bytes_do_not_depend_on_the_surroundings(quick: Built, tmp_path: Path, name: str) -> None:
    env = dict(CIRCUMSTANCES[name])
    run(quick.spec, tmp_path / "out", tmp_path / "cache", cwd=Path(env.pop("cwd", str(ROOT))), **env)
    assert digests(tmp_path / "out") == digests(quick.out)


@pytest.mark.parametrize("umask", ["000", "077"])
def test_the_bytes_do_not_depend_on_the_umask(quick: Built, tmp_path: Path, umask: str) -> None:
    words = command(quick.spec, tmp_path / "out", tmp_path / "cache")
    subprocess.run(["sh", "-c", f'umask {umask}; exec "$@"', "sh", *words], check=True, capture_output=True, cwd=ROOT)
    assert digests(tmp_path / "out") == digests(quick.out)


def test_memory_does_not_grow_with_the_jobs_for_ever(tmp_path: Path) -> None:
    """Each compressing thread holds blocks of its own: on a machine of 32 cores and more they are not all used."""
    tier = tmp_path / "tier"
    tier.mkdir()
    # Small blocks of text take longest to compress, so that every thread that may start does.
    text = b" ".join(b"%x" % (n * 2654435761 % 2**32) for n in range(100_000))
    for number in range(60):
        (tier / f"{number}.txt").write_bytes(b"%d" % number + text)
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"name": "t", "tag": "r1", "epoch": 0, "base": {"scratch": True}, "prefix": "/opt/t",
                                "tiers": {"base": {"path": "tier"}}}))  # fmt: skip
    most = 0

    def count(event: Event) -> None:
        nonlocal most
        most = max(most, sum(thread.name.startswith("compress") for thread in threading.enumerate()))

    build(spec, tmp_path / "out", BuildOptions(tmp_path / "cache", jobs=64), count)
    assert 1 < most <= MOST_THREADS


@pytest.mark.parametrize("jobs", ["1", "2", "8", "64"])
def test_the_bytes_do_not_depend_on_the_jobs(quick: Built, tmp_path: Path, jobs: str) -> None:
    run(quick.spec, tmp_path / "out", tmp_path / "cache", "--jobs", jobs)
    assert digests(tmp_path / "out") == digests(quick.out)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_bytes_do_not_depend_on_the_order_of_creation(tmp_path: Path, seed: int) -> None:
    (tmp_path / "a").mkdir()
    first = build_small(tmp_path / "a")
    copy_in_order(tmp_path / "a/envs", tmp_path / "b/envs", seed)
    for path in (tmp_path / "a/envs").rglob("*"):
        stat, to = path.lstat(), tmp_path / "b/envs" / path.relative_to(tmp_path / "a/envs")
        os.utime(to, ns=(stat.st_atime_ns, stat.st_mtime_ns), follow_symlinks=False)
    spec = write_spec(tmp_path / "b", {name: tmp_path / f"b/envs/{name}" for name in ("one", "two")})
    build(spec, tmp_path / "b/out", BuildOptions(tmp_path / "b/cache"))
    assert digests(tmp_path / "b/out") == digests(first.out)


def test_other_content_gives_other_bytes(quick: Built, tmp_path: Path) -> None:
    """Or the tests above would pass for a build that ignores its input."""
    tiers = small_tiers(tmp_path)
    (tiers["two"] / "lib/pkg/own.py").write_text("VALUE = 'TWO'\n")
    build(write_spec(tmp_path, tiers), tmp_path / "out", BuildOptions(tmp_path / "cache"))
    assert all(a != b for a, b in zip(digests(tmp_path / "out").values(), digests(quick.out).values(), strict=True))


def test_both_archives_pass_the_strict_proof(quick: Built) -> None:
    assert verify_archives([quick.oci, quick.docker], VerifyOptions("strict")).findings == ()


def test_nothing_changed_nothing_is_read(tmp_path: Path) -> None:
    """The second run opens no file of a tier; --check opens them all, and gives the same bytes."""
    made = build_small(tmp_path)
    before, times = digests(made.out), {name: (made.out / name).stat().st_mtime_ns for name in FILES}
    trace = tmp_path / "trace"
    assert run(made.spec, made.out, made.cache, TRACE=str(trace))["unchanged"] is True
    assert {name: (made.out / name).stat().st_mtime_ns for name in FILES} == times
    assert "spec.json" in trace.read_text() and "shared.bin" not in trace.read_text()
    assert run(made.spec, made.out, made.cache, "--check", TRACE=str(trace))["unchanged"] is False
    assert "shared.bin" in trace.read_text()
    assert digests(made.out) == before


def test_with_the_host_as_base_nothing_changed_nothing_is_made(tmp_path: Path) -> None:
    """The machine's files are looked at again, and none is read."""
    made = build_small(tmp_path, base={"host": True})
    times = {name: (made.out / name).stat().st_mtime_ns for name in FILES}
    assert run(made.spec, made.out, made.cache)["unchanged"] is True
    assert {name: (made.out / name).stat().st_mtime_ns for name in FILES} == times


def test_another_machine_as_base_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_small(tmp_path, base={"host": True})
    program = tmp_path / "bin/of-this-test"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(host, "_WELCOME", (*host._WELCOME, "of-this-test"))
    monkeypatch.setattr(host, "PATH", f"{host.PATH}:{program.parent}")
    time.sleep(0.05)
    assert not build(made.spec, made.out, BuildOptions(made.cache)).unchanged
    assert build(made.spec, made.out, BuildOptions(made.cache)).unchanged
    program.write_text("#!/bin/bash\n")
    assert not build(made.spec, made.out, BuildOptions(made.cache)).unchanged


def test_a_build_leaves_the_garbage_collector_as_it_was(tmp_path: Path) -> None:
    made = build_small(tmp_path)
    assert gc.isenabled()
    os.mkfifo(tmp_path / "envs/two/fifo")
    with pytest.raises(OciBuilderError):
        build(made.spec, made.out, BuildOptions(made.cache))
    assert gc.isenabled()
    gc.disable()
    try:
        (tmp_path / "envs/two/fifo").unlink()
        build(made.spec, made.out, BuildOptions(made.cache))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_planned_is_set_aside_from_the_collector_until_the_build_ends(tmp_path: Path) -> None:
    before = gc.get_freeze_count()
    seen: list[int] = []

    def look(event: Event) -> None:
        seen.append(gc.get_freeze_count())
        if stop and event.task.startswith("layer "):
            raise RuntimeError

    stop = False
    spec = write_spec(tmp_path, small_tiers(tmp_path))
    build(spec, tmp_path / "out", BuildOptions(tmp_path / "cache"), look)
    assert gc.get_freeze_count() <= before < max(seen)  # Python 3.12 begins with some, unfreezing which is no loss
    stop = True
    with pytest.raises(RuntimeError):
        build(spec, tmp_path / "out2", BuildOptions(tmp_path / "cache2"), look)
    assert gc.get_freeze_count() <= before


def test_one_tier_changed_only_its_layer_is_new(tmp_path: Path) -> None:
    made = build_small(tmp_path)
    before = {layer["name"]: layer["digest"] for layer in made.container["layers"]}
    (tmp_path / "envs/two/lib/pkg/own.py").write_text("VALUE = 'changed'\n")
    after = run(made.spec, made.out, made.cache)["container"]["layers"]
    changed = {layer["name"] for layer in after if layer["digest"] != before[layer["name"]]}
    assert changed == {"two"}


def test_a_lost_output_is_made_again(tmp_path: Path) -> None:
    made = build_small(tmp_path)
    before = digests(made.out)
    made.oci.unlink()
    assert run(made.spec, made.out, made.cache)["unchanged"] is False
    assert digests(made.out) == before


def test_a_cache_is_only_a_help(tmp_path: Path) -> None:
    """The slow way and the fast way give the same bytes, whatever happened to the cache."""
    made = build_small(tmp_path)
    before = digests(made.out)
    (made.cache / "build.sqlite").write_bytes(b"no database" * 1000)
    run(made.spec, tmp_path / "again", made.cache)
    assert digests(tmp_path / "again") == before
    shutil.rmtree(made.cache)
    run(made.spec, tmp_path / "fresh", made.cache)
    assert digests(tmp_path / "fresh") == before


@pytest.mark.parametrize("option", [(), ("--check",)])
def test_a_layer_that_rotted_in_the_cache_is_not_shipped(tmp_path: Path, option: tuple[str, ...]) -> None:
    """C2-14: the disk changed a byte and no time of the file. It is said, nothing is published, and the next build heals it."""
    made = build_small(tmp_path)
    before = digests(made.out)
    blob = max((made.cache / "store/blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    status, record = blob.stat(), made.cache / f"store/records/{blob.name}.json"
    same = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    record.write_text(json.dumps({**json.loads(record.read_text()), "stat": same}))
    words = command(made.spec, tmp_path / "again", made.cache, *option)
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, "error[blob.digest]" in done.stderr) == (3, True), done.stderr
    assert not list((tmp_path / "again").iterdir())
    run(made.spec, tmp_path / "again", made.cache, *option)
    assert digests(tmp_path / "again") == before


def big_tier(folder: Path, megabytes: int = 24) -> Path:
    """Files that compress badly, so that a build takes a while."""
    tier = folder / "envs/big"
    tier.mkdir(parents=True)
    for n in range(megabytes):
        (tier / f"{n}.bin").write_bytes(random.Random(n).randbytes(1 << 20))
    return tier


def test_killed_at_any_moment_nothing_partial_is_visible(tmp_path: Path) -> None:
    """kill -9, again and again; then the next run ends well, with the same bytes."""
    spec = write_spec(tmp_path, {"big": big_tier(tmp_path)})
    good = build(spec, tmp_path / "good", BuildOptions(tmp_path / "other cache"))
    out, cache = tmp_path / "out", tmp_path / "cache"
    kills, start, rng = 0, time.monotonic(), random.Random(7)
    run(spec, tmp_path / "whole", tmp_path / "another cache")
    seconds = time.monotonic() - start
    for _ in range(60):
        process = subprocess.Popen(command(spec, out, cache), stdout=-3, stderr=-3, cwd=ROOT, start_new_session=True)
        try:
            assert process.wait(seconds * rng.uniform(0.3, 1)) == 0
            seconds *= 0.8
            shutil.rmtree(cache)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
            process.wait()
        for name in FILES:
            if (out / name).exists():
                assert digests(good.out)[name] == hashlib.sha256((out / name).read_bytes()).hexdigest()
        if kills == 5:
            break
    assert kills == 5
    run(spec, out, cache)
    assert digests(out) == digests(good.out)
    assert sorted(p.name for p in out.iterdir()) == sorted(FILES), "what a dead build left is cleared away"


def test_two_builds_at_once_share_the_store(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, {"big": big_tier(tmp_path, 8)})
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda n: run(spec, tmp_path / f"out{n}", tmp_path / "cache"), range(3)))
    one, two, three = (digests(tmp_path / f"out{n}") for n in range(3))
    assert one == two == three


def test_two_builds_at_once_into_one_folder(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, {"big": big_tier(tmp_path, 8)})
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: run(spec, tmp_path / "out", tmp_path / "cache"), range(2)))
    assert verify_archives([tmp_path / "out" / n for n in FILES[:2]], VerifyOptions("strict")).findings == ()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(FILES)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_payload(tmp_path: Path) -> None:
    """B210, B211: at most 400 MiB (requirements, section 11), here for one file of 400 MB and many blocks.

    Under a limit of the address space: nothing as large as a layer may even be mapped.
    """
    tier = tmp_path / "envs/big"
    tier.mkdir(parents=True)
    piece = random.Random(0).randbytes(6 << 20)
    with (tier / "one.bin").open("wb") as file:
        for n in range(64):
            file.write(n.to_bytes(8, "big") + piece)
    words = command(write_spec(tmp_path, {"big": tier}), tmp_path / "out", tmp_path / "cache")
    # In a small process between: what this one's other children took, and this one itself, is not the build's.
    count = "import resource, subprocess, sys; resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20));"
    count += "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
    count += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    archives = [str(tmp_path / "out" / name) for name in ("runtime.oci.tar", "runtime.docker.tar.gz")]
    peak = 0
    for run in (words, [*words[:3], "verify", *archives]):
        ran = subprocess.run([sys.executable, "-c", count, *run], check=True, capture_output=True, cwd=ROOT)
        peak = max(peak, int(ran.stdout))
    shutil.rmtree(tmp_path)
    assert peak <= 400 * 1024


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"prefix": "relative/path"}, "spec.field", "prefix"),
        ({"tag": "no spaces here"}, "spec.field", "tag"),
        ({"name": "Upper/Case"}, "spec.field", "name"),
        ({"epoch": -1}, "spec.field", "epoch"),
        ({"base": {"registry": "docker.io/library/debian:12"}}, "spec.", "digest"),
        ({"base": {"scratch": True, "host": True}}, "spec.field", "base"),
        ({"tiers": {}}, "spec.", "tiers"),
        ({"tiers": {"x": {"path": "/nonexistent/place"}}}, "spec.tier", "/nonexistent/place"),
        ({"unknown": 1}, "spec.field", "unknown"),
        ({"compression": {"codec": "lzma"}}, "spec.field", "codec"),
        ({"limits": {"no_such_limit": 1}}, "spec.", "no_such_limit"),
    ],
)
def test_a_wrong_spec_names_the_field(tmp_path: Path, change: dict[str, Any], code: str, says: str) -> None:
    """Exit status 2, and nothing is made."""
    spec = write_spec(tmp_path, small_tiers(tmp_path), **{k: v for k, v in change.items() if k != "tiers"})
    if "tiers" in change:
        spec.write_text(json.dumps({**json.loads(spec.read_text()), "tiers": change["tiers"]}))
    with pytest.raises(OciBuilderError) as error:
        build(spec, tmp_path / "out", BuildOptions(tmp_path / "cache"))
    assert error.value.exit_status == 2
    assert error.value.code.startswith(code)
    assert says in error.value.message
    assert not any((tmp_path / "out" / name).exists() for name in FILES)


def test_an_output_folder_that_cannot_be_made(quick: Built, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OciBuilderError) as error:
        build(quick.spec, tmp_path / "file/out", BuildOptions(tmp_path / "cache"))
    assert error.value.exit_status == 5
