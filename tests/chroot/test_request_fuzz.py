"""Seeded requests that nobody meant: a receipt or a clear code comes out, nothing else. Standard library only."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import unittest
from collections.abc import Iterator
from typing import Any

from chroot_exec.errors import RequestError
from chroot_exec.protocol import parse_request
from tests.chroot.lab import WAIT, SandboxCase

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "/", "/proc", "/dev/null",
    "a\0b", "\ud800", "\u202e", "../..", [], [""], ["/bin/true"], [None], [[]], {}, {"": ""}, {"a": 1}, {"A=B": "c"},
    "x" * 5000, ["x" * 200000], "all", "root", "overlay", "exit", "json", "(", "(a+)+$", "%s%n", "-1",
)  # fmt: skip
CHECK: dict[str, Any] = {
    "name": "a", "argv": ["/bin/true"], "exit": 0, "stdout": [""], "stderr": [""], "reject": ["x"], "timeout": 5,
    "env": {"A": "b"}, "user": "0", "workdir": "/", "shm": 0, "gpus": 0, "twins": [], "result": "exit", "deferrable": False,
}  # fmt: skip
MORE: dict[str, Any] = {
    "write": "overlay", "read_only": False, "network": "none", "hostname": "sandbox", "shm_size": 65536, "tmp_size": 65536,
    "binds": [{"source": "/etc/hostname", "target": "/mnt/x", "read_only": True}], "tmpfs": ["/mnt/t"],
    "config": {"Env": ["A=b"], "User": "0", "WorkingDir": "/", "Entrypoint": None, "Cmd": ["/bin/true"]},
    "env": {"B": "c"}, "user": "", "workdir": "", "rlimits": {"nofile": 64, "core": 0}, "output_limit": 1000,
    "entrypoint": None, "gpu": None,
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from places(child, (*path, key))


def changed(value: Any, source: random.Random) -> Any:
    """The value with one or two places replaced, removed or renamed."""
    out = copy.deepcopy(value)
    for _ in range(source.randint(1, 2)):
        path = source.choice([p for p in places(out) if p])
        holder = out
        for key in path[:-1]:
            holder = holder[key]
        kind = source.random()
        if kind < 0.8:
            holder[path[-1]] = source.choice(ODD)
        elif kind < 0.9 or isinstance(holder, list):
            del holder[path[-1]]
        else:
            holder[str(source.choice(ODD))] = holder.pop(path[-1])
        if not isinstance(out, dict):
            return out
    return out


class Parsing(unittest.TestCase):
    def test_a_request_or_a_code(self) -> None:
        source = random.Random(20261130)
        base = {"schema": "chroot-exec/1", "root": "/", **MORE, "checks": [CHECK]}
        refused = 0
        for number in range(4000):
            text = json.dumps(changed(base, source))
            try:
                parse_request(text)
            except RequestError as error:
                refused += 1
                self.assertRegex(error.code, r"\Arequest\.(json|field)\Z", f"{number}: {text[:300]}")
                self.assertLess(len(error.message), 1000, text[:300])
        self.assertGreater(refused, 2000)

    def test_bytes_that_are_no_request(self) -> None:
        source = random.Random(1130)
        text = json.dumps({"schema": "chroot-exec/1", "root": "/", **MORE, "checks": [CHECK]}).encode()
        for _ in range(3000):
            data = bytearray(text)
            for _ in range(source.randint(1, 5)):
                data[source.randrange(len(data))] = source.randrange(256)
            try:
                parse_request(bytes(data[: source.randint(0, len(data))] if source.random() < 0.3 else data))
            except RequestError as error:
                self.assertRegex(error.code, r"\Arequest\.(json|field)\Z")


class Running(SandboxCase):
    """What the parser takes is run."""

    isolation = "root"
    seed = 4

    def test_a_receipt_or_a_code(self) -> None:
        source = random.Random(self.seed)
        taken = 0
        while taken < 30:
            value = changed({**MORE, "checks": [CHECK]}, source)
            request = {**self.request(), **value}
            try:
                parse_request(json.dumps(request))
            except RequestError:
                continue
            if request.get("isolation") != self.isolation or request["root"] != str(self.root):
                continue
            taken += 1
            with self.subTest(str(value)[:200]):
                self.run_one(request)

    def run_one(self, request: dict[str, Any]) -> None:
        with self.start(request) as process:
            try:
                _, errors = process.communicate(timeout=WAIT)
            except subprocess.TimeoutExpired:
                process.kill()
                self.fail("it does not end")
        receipt = self.receipt()
        self.assertEqual(errors, b"")
        self.assertIn(process.returncode, (0, 1, 125))
        self.assertEqual(process.returncode == 0, receipt["outcome"] in ("pass", "deferred"))
        for code in filter(None, [(receipt["error"] or {}).get("code"), *(c["code"] for c in receipt["checks"])]):
            self.assertRegex(code, r"\A[a-z]+\.[a-z_]+\Z")
            self.assertNotIn(code, ("sandbox.internal", "sandbox.died"))
        self.assertEqual([p.name for p in self.state.iterdir()], ["receipt.json"])


class RunningRootless(Running):
    isolation = "rootless"
    seed = 5
