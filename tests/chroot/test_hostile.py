"""Roots that try to fool the runner: C12-04, C12-05, and programs that look for a way out."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import unittest
from pathlib import Path

from chroot_exec.errors import RunnerError
from chroot_exec.resolve import Root
from tests.chroot.lab import SandboxCase, mount_points, tiny_root

SECRET = "a secret beside the root"


class Victim(SandboxCase):
    """Each test has a root of its own, and a folder beside it that must stay as it is and stay unseen."""

    isolation = "root"

    def setUp(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="victim-", dir=self.folder))
        self.place.chmod(0o755)
        self.hostile = tiny_root(self.place / "root")
        self.victim = self.place / "victim"
        self.victim.mkdir()
        (self.victim / "secret").write_text(SECRET)
        self.before = mount_points(self.place)

    def tearDown(self) -> None:
        self.assertEqual([p.name for p in self.victim.iterdir()], ["secret"])
        self.assertEqual((self.victim / "secret").read_text(), SECRET)
        self.assertEqual(mount_points(self.place), self.before)
        shutil.rmtree(self.place)

    def become_link(self, path: str, target: str) -> None:
        place = self.hostile / path.lstrip("/")
        if place.is_dir() and not place.is_symlink():
            shutil.move(str(place), str(place) + ".moved")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)


class HostileRoot(Victim):
    def test_links_out_of_the_root_end_inside(self) -> None:
        """C12-05, and with a relative way out."""
        for name in ("dev", "proc", "sys", "tmp", "run"):
            for target in ("/victim", "../" * 20 + "victim", "../victim"):
                with self.subTest(name, target=target):
                    self.become_link(name, target)
                    script = "echo > /dev/null; ls /proc/1 > /dev/null; echo x > /tmp/x; ls -A /tmp /victim"
                    text = self.out(script, root=str(self.hostile))
                    self.assertNotIn("secret", text)
                (self.hostile / name).unlink()

    def test_etc_as_a_link_out(self) -> None:
        shutil.rmtree(self.hostile / "etc")
        self.become_link("etc", str(self.victim))
        self.assertIn("localhost", self.out("cat /etc/hosts", root=str(self.hostile)))

    def test_etc_passwd_as_a_link_out(self) -> None:
        (self.victim / "secret").write_text(SECRET)
        (self.hostile / "etc/passwd").unlink()
        self.become_link("etc/passwd", "/../../../../../../etc/passwd")
        check = self.run_checks({"name": "a", "argv": ["true"]}, root=str(self.hostile), user="daemon")["checks"][0]
        self.assertEqual(check["code"], "user.unknown")

    def test_etc_passwd_as_a_pipe(self) -> None:
        (self.hostile / "etc/passwd").unlink()
        os.mkfifo(self.hostile / "etc/passwd")
        self.assertEqual(self.out("id -u", root=str(self.hostile)), "0\n")

    def test_dev_null_as_a_file_or_link(self) -> None:
        """C12-04: it is neither used nor written through."""
        (self.hostile / "dev").mkdir()
        for make in (lambda p: p.write_text("old"), lambda p: p.symlink_to(self.victim / "secret")):
            null = self.hostile / "dev/null"
            make(null)
            with self.subTest(null):
                text = self.out("echo new > /dev/null; stat -c '%F %t:%T' /dev/null", root=str(self.hostile))
                self.assertEqual(text, "character special file 1:3\n")
                self.assertIn(null.read_text() if not null.is_symlink() else "old", "old")
            null.unlink()

    def test_files_where_folders_should_be(self) -> None:
        for name in ("dev", "proc", "tmp"):
            with self.subTest(name):
                place = self.hostile / name
                shutil.rmtree(place, ignore_errors=True)
                place.write_text("a file")
                receipt = self.run_checks({"name": "a", "argv": ["true"]}, root=str(self.hostile), status=125)
                self.assertEqual(receipt["checks"][0]["code"], "sandbox.target")
                place.unlink()

    def test_links_to_the_root_and_into_each_other(self) -> None:
        for name, target in (("dev", "/"), ("proc", "."), ("sys", "proc"), ("dev", "proc")):
            with self.subTest(name, target=target):
                self.become_link(name, target)
                receipt = self.run_checks({"name": "a", "argv": ["true"]}, root=str(self.hostile), status=125)
                self.assertEqual(receipt["checks"][0]["code"], "sandbox.target")
                (self.hostile / name).unlink()

    def test_scratch_folders_that_are_links_into_the_kernel(self) -> None:
        """Else /tmp would cover /proc, and what guards it."""
        for name in ("tmp", "run"):
            for target in ("/proc", "/dev", "/sys", "/", "/proc/sys", "."):
                with self.subTest(name, target=target):
                    self.become_link(name, target)
                    receipt = self.run_checks({"name": "a", "argv": ["true"]}, root=str(self.hostile), status=125)
                    self.assertEqual(receipt["checks"][0]["code"], "sandbox.target")
                    (self.hostile / name).unlink()

    def test_links_that_images_really_have(self) -> None:
        """Debian's, systemd's and others'."""
        for name, target in (
            ("tmp", "var/tmp"), ("var/run", "/run"), ("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf"),
            ("etc/mtab", "../proc/self/mounts"), ("etc/hostname", "/run/name"), ("home/x", "/root"),
        ):  # fmt: skip
            self.become_link(name, target)
        text = self.out("cat /etc/resolv.conf /etc/hostname; echo x > /tmp/x; ls /var/tmp", root=str(self.hostile))
        self.assertEqual(text, "# no network\nsandbox\nx\n")

    def test_etc_as_a_link_into_the_kernel(self) -> None:
        shutil.rmtree(self.hostile / "etc")
        for target in ("/proc", "/proc/self/fd", "/dev", "/sys", "/proc/1/root"):
            with self.subTest(target):
                self.become_link("etc", target)
                text = self.out("cat /proc/sys/kernel/ostype; echo > /dev/null", root=str(self.hostile))
                self.assertEqual(text, "Linux\n")
                (self.hostile / "etc").unlink()

    def test_names_are_not_waited_for(self) -> None:
        """/etc/passwd that leads to a file of /proc which blocks its reader."""
        for target in ("/proc/kmsg", "/dev/zero", "/dev/tty", "/proc/self/pagemap"):
            with self.subTest(target):
                (self.hostile / "etc/passwd").unlink()
                self.become_link("etc/passwd", target)
                self.assertEqual(self.out("id -u", root=str(self.hostile)), "0\n")

    def test_a_working_folder_through_an_open_descriptor(self) -> None:
        """As CVE-2024-21626."""
        for number in range(3, 24):
            for path in (f"/proc/self/fd/{number}", f"/proc/self/fd/{number}/../../.."):
                script = f"ls {os.path.relpath(self.victim, '/')} ../../../../../..{self.victim} victim ../victim 2>/dev/null; true"
                check = self.shell(script, root=str(self.hostile), workdir=path)
                self.assertNotIn("secret", str(check["stdout"]), path)

    def test_a_loader_that_is_the_runner_itself(self) -> None:
        """As CVE-2019-5736, by an ELF file's loader."""
        program = bytearray(Path(os.path.realpath("/bin/true")).read_bytes())
        at = program.index(b"/lib64/ld-linux-x86-64.so.2\0") if b"/lib64/ld-linux-x86-64.so.2\0" in program else -1
        if at < 0:
            self.skipTest("another loader than x86-64's")
        program[at : at + 15] = b"/proc/self/exe\0"
        (self.hostile / "bin/loaded").write_bytes(program)
        (self.hostile / "bin/loaded").chmod(0o755)
        check = self.run_checks({"name": "a", "argv": ["loaded"]}, root=str(self.hostile), status=125)["checks"][0]
        self.assertEqual(check["code"], "exec.magic")

    def test_forms_of_programs_that_kernels_read_more_widely(self) -> None:
        """CVE-2019-5736 by what a kernel takes and a reader of programs does not: each leads to the runner itself."""
        evil = b"/proc/self/exe"
        loader = struct.pack("<IIQQQQQQ", 3, 4, 0, 0, 0, len(evil) + 1, len(evil) + 1, 1)
        nothing = struct.pack("<IIQQQQQQ", 0, 0, 0, 0, 0, 0, 0, 0)

        def elf(ident: bytes, headers: list[bytes]) -> bytes:
            head = ident.ljust(16, b"\0") + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, 0, 64, 0, 0, 64, 56, len(headers), 0, 0, 0)
            at = struct.pack("<Q", 64 + 56 * len(headers))
            return head + b"".join(h[:8] + at + h[16:] for h in headers) + evil + b"\0"

        os.symlink("/proc/self/exe", os.fsencode(self.hostile) + b"/bin/l\xff\r")
        good = b"\x7fELF\x02\x01\x01"
        forms = {
            "return": b"#!/bin/l\xff\r\n", "nul": b"#!/proc/self/exe\0 x\n", "tab": b"#!\t /proc/self/exe\tx\n",
            "form-feed": b"#!/proc/self/exe\n\x0c", "unended": b"#!/proc/self/exe \xff",
            "class": elf(b"\x7fELF\x01\x01\x01", [loader]), "order": elf(b"\x7fELF\x02\x02\x01", [loader]),
            "none": elf(b"\x7fELF", [loader]), "many": elf(good, [nothing] * 300 + [loader]), "plain": elf(good, [loader]),
        }  # fmt: skip
        for number in range(6):
            forms[f"chain{number}"] = f"#!/bin/chain{number - 1}\n".encode() if number else forms["plain"]
        for name, data in forms.items():
            (self.hostile / "bin" / name).write_bytes(data)
            (self.hostile / "bin" / name).chmod(0o755)
        checks = [{"name": name, "argv": [name]} for name in forms]
        receipt = self.run_checks(*checks, root=str(self.hostile), status=125)
        self.assertEqual({c["name"]: c["code"] for c in receipt["checks"]}, dict.fromkeys(forms, "exec.magic"))

    def test_a_program_that_its_user_may_run_and_not_read(self) -> None:
        """Whoever reads it for the user must be able to."""
        (self.hostile / "bin/shut").write_text("#!/proc/self/exe\n")
        shutil.copy(os.path.realpath("/bin/true"), self.hostile / "bin/fine")
        for name in ("shut", "fine"):
            (self.hostile / "bin" / name).chmod(0o711)
        checks = [{"name": name, "argv": [name], "user": "someone"} for name in ("shut", "fine")]
        receipt = self.run_checks(*checks, root=str(self.hostile))
        self.assertEqual([c["code"] for c in receipt["checks"]], ["exec.magic", ""])

    def test_a_device_node_in_the_tree_cannot_be_opened(self) -> None:
        """An unpacked tree of somebody else's tool can hold one."""
        os.mknod(self.hostile / "zero", 0o20666, os.makedev(1, 5))
        for write in ("overlay", "direct"):
            with self.subTest(write):
                check = self.shell("head -c 1 /zero", root=str(self.hostile), write=write)
                self.assertNotEqual(check["exit"], 0)

    def test_a_bind_through_a_link_lands_inside(self) -> None:
        self.become_link("mnt", str(self.victim))
        source = self.place / "source"
        source.mkdir()
        binds = [{"source": str(source), "target": "/mnt/deep/er", "read_only": False}]
        self.out("echo x > /mnt/deep/er/file", root=str(self.hostile), binds=binds)
        self.assertEqual((source / "file").read_text(), "x\n")

    def test_a_loop_of_links(self) -> None:
        self.become_link("run", "loop")
        self.become_link("loop", "run")
        receipt = self.run_checks({"name": "a", "argv": ["true"]}, root=str(self.hostile), status=125)
        self.assertEqual(receipt["checks"][0]["code"], "sandbox.target")

    def test_the_hosts_interpreter_cannot_be_started(self) -> None:
        """As CVE-2019-5736: a program that is a link to the runner's own executable."""
        self.become_link("bin/evil", "/proc/self/exe")
        (self.hostile / "bin/script").write_text("#!/proc/self/exe\n")
        (self.hostile / "bin/script").chmod(0o755)
        for name in ("evil", "script"):
            with self.subTest(name):
                check = self.run_checks({"name": "a", "argv": [name]}, root=str(self.hostile), status=125)["checks"][0]
                self.assertEqual(check["code"], "exec.magic")

    def test_the_runner_s_executable_cannot_be_opened(self) -> None:
        self.assertNotEqual(self.shell("cat /proc/1/exe > /dev/null", root=str(self.hostile))["exit"], 0)
        for script in ("ls /proc/1/root/", "ls /proc/1/cwd/", "readlink /proc/1/fd/[0-9]*", "cat /proc/1/fd/[0-9]*"):
            with self.subTest(script):
                self.assertNotEqual(self.shell(script, root=str(self.hostile))["exit"], 0)

    def test_no_descriptor_of_the_host_is_left_open(self) -> None:
        self.assertEqual(self.out("ls /proc/self/fd", root=str(self.hostile)).split(), ["0", "1", "2", "3"])

    def test_chroot_does_not_lead_out(self) -> None:
        script = f"mkdir /x; cd /; chroot /x /bin/true 2>/dev/null; cd ../../../../..; ls {self.victim}"
        self.assertNotEqual(self.shell(script, root=str(self.hostile))["exit"], 0)


class Walk(unittest.TestCase):
    """resolve.Root alone."""

    def setUp(self) -> None:
        self.place = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.place)
        (self.place / "root/a").mkdir(parents=True)
        (self.place / "outside").mkdir()
        self.made: list[str] = []
        self.root = Root(str(self.place / "root"), self.made.append)
        self.addCleanup(self.root.close)

    def where(self, path: str, create: str = "") -> str:
        fd = self.root.open(path, create)
        try:
            return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), self.place / "root")
        finally:
            os.close(fd)

    def test_dots_stay_inside(self) -> None:
        self.assertEqual(self.where("/../../a"), "a")
        self.assertEqual(self.where("../a/../../a/."), "a")

    def test_links_stay_inside(self) -> None:
        (self.place / "root/abs").symlink_to(self.place / "outside")
        (self.place / "root/up").symlink_to("../../../outside")
        self.assertEqual(self.where("/up", "dir"), "outside")
        self.assertEqual(self.where("/abs/new", "dir"), str(self.place / "outside/new").lstrip("/"))
        self.assertEqual(list((self.place / "outside").iterdir()), [])

    def test_what_was_made_is_told_outermost_first(self) -> None:
        self.where("/x/y/z", "file")
        self.assertEqual(self.made, ["x", "x/y", "x/y/z"])

    def test_a_missing_path(self) -> None:
        with self.assertRaises(RunnerError) as caught:
            self.root.open("/none")
        self.assertEqual(caught.exception.code, "sandbox.target")

    def test_a_file_as_a_parent(self) -> None:
        (self.place / "root/file").write_text("")
        with self.assertRaises(RunnerError):
            self.root.open("/file/x", "dir")


if __name__ == "__main__":
    unittest.main()
