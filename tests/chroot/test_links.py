"""Roots whose /dev, /etc, /proc, /sys, /run and /tmp link to one another: a right sandbox, or none (C12-05)."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tests.chroot.lab import ORDINARY_UID
from tests.chroot.test_hostile import Victim

# Says what is wrong with the sandbox, and nothing when all is right.
PROBE = """
for pair in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0; do
    name=${pair%%:*}; want=${pair#*:}
    [ "$(stat -c %t:%T /dev/$name 2>&1)" = "$want" ] || echo "/dev/$name"
done
[ "$(cat /proc/$$/comm 2>&1)" = sh ] || [ "$(cat /proc/$$/comm)" = dash ] || echo /proc
[ -w /proc/sys/kernel/panic ] && (echo 1 > /proc/sys/kernel/panic) 2> /dev/null && echo "/proc/sys can be written"
[ "$(cat /sys/class/net/lo/ifindex 2>&1)" = 1 ] || echo /sys
(echo 9000 > /sys/class/net/lo/mtu) 2> /dev/null && echo "/sys can be written"
for folder in /tmp /run /dev/shm; do
    [ "$(stat -f -c %T $folder)" = tmpfs ] && echo x > $folder/.written || echo $folder
done
case $(cat /etc/hosts /etc/resolv.conf 2>&1) in *localhost*"no network"*) ;; *) echo names;; esac
exit 0
"""
RIGHT, REFUSED, NAMELESS = "", "sandbox.target", "names\n"
OWN = ("dev", "proc", "sys")
NAMES = ("dev", "etc", "proc", "sys", "run", "tmp")
TARGETS = ("/tmp/x", "../run/x/y", "/run", "/tmp", "/dev/x", "/dev", "/dev/shm", "/dev/shm/x", "/proc/x", "/sys", "/", "/srv/x")  # fmt: skip
FEW = (
    ("dev", "/tmp/x"), ("dev", "/run/x/y"), ("etc", "/tmp/x"), ("proc", "/run/x"), ("sys", "/tmp/x/y"), ("tmp", "/run"),
    ("run", "/tmp/x"), ("tmp", "/dev/shm"), ("run", "/dev/x"), ("dev", "/tmp"), ("etc", "/dev/x"),
)  # fmt: skip


def expected(name: str, target: str) -> str:
    """What must come of a root in which ``/name`` links to ``target``: a code, or what the probe prints."""
    first, _, rest = target.strip("./").partition("/")
    in_shared_memory = f"{first}/{rest}/".startswith("dev/shm/")
    if name == "etc":
        # Its files are placed, unless that would change a kernel file system.
        return NAMELESS if first in OWN and not in_shared_memory else RIGHT
    if not first or (first in OWN and not in_shared_memory):
        return REFUSED
    # A scratch folder can be one with another; a kernel file system needs a place of its own.
    alone = name in OWN and target in ("/run", "/tmp", "/dev/shm")
    return REFUSED if alone else RIGHT


class LinksBetweenPlaces(Victim):
    """The whole table as root below an overlay; what differs elsewhere comes from the same code."""

    def become(self, name: str, target: str, **changes: str) -> str:
        """Outcome of a sandbox in a root with that link."""
        self.become_link(name, target)
        check = {"name": "probe", "argv": ["/bin/sh", "-c", PROBE]}
        found = self.run_checks(check, root=str(self.hostile), **changes)["checks"][0]
        place = self.hostile / name
        place.unlink()
        if (moved := place.with_name(f"{name}.moved")).exists():
            moved.rename(place)
        return str(found["code"] or found["stdout"]["text"])

    def try_all(self, pairs: Iterable[tuple[str, str]], **changes: str) -> None:
        for name, target in pairs:
            if target.strip("./").split("/")[0] != name:
                with self.subTest(f"/{name} -> {target}", **changes):
                    self.assertEqual(self.become(name, target, **changes), expected(name, target))


class AsRoot(LinksBetweenPlaces):
    isolation = "root"

    def test_every_pair(self) -> None:
        self.try_all((name, target) for name in NAMES for target in TARGETS)

    def test_writing_to_the_tree_itself(self) -> None:
        """And nothing is left in it, nor taken from it."""
        (self.hostile / "tmp/x").mkdir(parents=True)
        before = sorted(self.hostile.rglob("*"))
        self.try_all(FEW, write="direct")
        self.assertEqual(sorted(self.hostile.rglob("*")), before)


class Rootless(LinksBetweenPlaces):
    isolation = "rootless"

    def setUp(self) -> None:
        super().setUp()
        if os.geteuid() == 0:
            for path in (self.hostile, *self.hostile.rglob("*")):
                os.chown(path, ORDINARY_UID, ORDINARY_UID, follow_symlinks=False)

    def test_some_pairs(self) -> None:
        self.try_all(FEW)

    def test_writing_to_the_tree_itself(self) -> None:
        self.try_all(FEW, write="direct")


class OtherLinks(Victim):
    """What is placed last must not cover what was placed first."""

    isolation = "root"

    def test_names_that_are_links_to_a_device(self) -> None:
        """A masked unit's habit; mounting over the link's target would leave no /dev/null."""
        self.become_link("etc/hosts", "/dev/null")
        self.become_link("etc/resolv.conf", "/proc/version")
        self.assertEqual(self.out(PROBE, root=str(self.hostile)), NAMELESS)

    def test_a_bind_through_a_link(self) -> None:
        source = self.place / "source"
        source.mkdir()
        for target in ("/", "/dev", "/proc", "/sys", "/proc/self/fd", "/dev/pts/../.."):
            with self.subTest(target):
                self.become_link("data", target)
                binds = [{"source": str(source), "target": "/data"}]
                found = self.run_checks({"name": "a", "argv": ["true"]}, root=str(self.hostile), binds=binds)
                self.assertEqual(found["checks"][0]["code"], REFUSED)
                (self.hostile / "data").unlink()

    def test_a_file_bound_through_a_link(self) -> None:
        self.become_link("file", "/dev/null")
        binds = [{"source": str(self.victim / "secret"), "target": "/file"}]
        found = self.run_checks({"name": "a", "argv": ["true"]}, root=str(self.hostile), binds=binds)
        self.assertEqual(found["checks"][0]["code"], REFUSED)

    def test_a_bind_where_dev_leads(self) -> None:
        """The caller may cover /tmp, but not the devices with it."""
        self.become_link("dev", "/tmp/dev")
        for more in ({"binds": [{"source": str(self.victim), "target": "/tmp"}]}, {"tmpfs": ["/tmp/dev"]}):
            with self.subTest(more):
                found = self.run_checks({"name": "a", "argv": ["true"]}, root=str(self.hostile), **more)
                self.assertEqual(found["checks"][0]["code"], REFUSED)

    def test_a_twin_through_a_link(self) -> None:
        self.become_link("data", "/dev")
        check = {"name": "a", "argv": ["true"], "twins": [{"source": "/etc", "target": "/data"}]}
        self.assertEqual(self.run_checks(check, root=str(self.hostile))["checks"][0]["code"], REFUSED)

    def test_devices_can_be_bound_below_dev(self) -> None:
        binds = [{"source": "/dev/null", "target": "/dev/mine"}]
        self.assertEqual(self.out("stat -c %t:%T /dev/mine", root=str(self.hostile), binds=binds), "1:3\n")
