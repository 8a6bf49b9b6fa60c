"""What a program finds in the sandbox, as root and as an ordinary user in user namespaces."""

from __future__ import annotations

import os
import unittest
from pathlib import Path

from tests.chroot.lab import SandboxCase, mount_points


class Properties:
    """Holds for both ways; the classes below run it."""

    def test_device_nodes_have_their_type_and_number(self) -> None:
        """C12-04."""
        text = self.out("stat -c '%n %F %t:%T %a' /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty")
        for name, number in (("null", "1:3"), ("zero", "1:5"), ("full", "1:7"), ("random", "1:8"), ("urandom", "1:9")):
            self.assertIn(f"/dev/{name} character special file {number} 666", text)
        self.assertIn("/dev/tty character special file 5:0 666", text)

    def test_device_nodes_work(self) -> None:
        script = "echo gone > /dev/null; head -c 3 /dev/zero | wc -c; head -c 4 /dev/urandom | wc -c; ls -l /dev/fd/0"
        self.assertEqual(self.out(script).split()[:2], ["3", "4"])
        self.assertNotEqual(self.shell("echo x > /dev/full")["exit"], 0)

    def test_no_other_device_is_there(self) -> None:
        names = self.out("ls /dev").split()
        wanted = "fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero"
        self.assertEqual(sorted(names), wanted.split())

    def test_a_device_cannot_be_made(self) -> None:
        self.assertNotEqual(self.shell("mknod /tmp/mem c 1 1")["exit"], 0)

    def test_only_loopback_and_it_is_up(self) -> None:
        text = self.out("cat /proc/net/dev; cat /sys/class/net/lo/flags")
        self.assertEqual([line.split(":")[0].strip() for line in text.splitlines() if ":" in line], ["lo"])
        self.assertEqual(int(text.split()[-1], 16) & 1, 1)

    def test_the_program_sees_only_its_own_processes(self) -> None:
        self.assertEqual(self.out("echo $$; echo /proc/[0-9]*").split()[1:], ["/proc/1", "/proc/2"])

    def test_kernel_settings_and_sysfs_are_read_only(self) -> None:
        check = self.shell("echo 1 > /proc/sys/kernel/panic; echo x > /sys/class/net/lo/mtu; true")
        self.assertEqual(check["stderr"]["text"].count("\n"), 2, check["stderr"])

    def test_mounting_is_refused(self) -> None:
        """The seccomp list and the capabilities."""
        self.assertNotEqual(self.shell("mount -t tmpfs none /tmp")["exit"], 0)

    def test_no_new_privileges_and_a_filter(self) -> None:
        text = self.out("cat /proc/self/status")
        self.assertIn("NoNewPrivs:\t1", text)
        if os.uname().machine == "x86_64":
            self.assertIn("Seccomp:\t2", text)

    def test_few_capabilities(self) -> None:
        line = next(r for r in self.out("cat /proc/self/status").splitlines() if r.startswith("CapEff"))
        self.assertEqual(int(line.split()[1], 16) & ~0xA00405FB, 0)

    def test_what_a_check_writes_is_gone_for_the_next(self) -> None:
        """B178: segments that a killed exchange leaves in /dev/shm among it; a sandbox has a /dev/shm of its own."""
        script = "ls /made /tmp/made /dev/shm/made /run/made; echo x > /made; echo x >/tmp/made; echo x >/dev/shm/made"
        checks = [{"name": n, "argv": ["/bin/sh", "-c", script + "; echo x >/run/made"]} for n in ("first", "second")]
        receipt = self.run_checks(*checks, status=0)
        for check in receipt["checks"]:
            self.assertEqual(check["stdout"]["text"], "")

    def test_the_tree_is_untouched(self) -> None:
        before = sorted(p.relative_to(self.root) for p in self.root.rglob("*"))
        self.out("echo x > /made; rm /etc/passwd; mkdir /new")
        self.assertEqual(sorted(p.relative_to(self.root) for p in self.root.rglob("*")), before)

    def test_nothing_stays_mounted(self) -> None:
        before = mount_points(self.state)
        self.out("true")
        self.assertEqual(mount_points(self.state), before)
        self.assertEqual([p.name for p in self.state.iterdir()], ["receipt.json"])

    def test_names_and_resolver(self) -> None:
        script = "cat /etc/hosts /etc/hostname /proc/sys/kernel/hostname /etc/resolv.conf"
        text = self.out(script, hostname="node7")
        self.assertIn("127.0.0.1\tlocalhost", text)
        self.assertEqual(text.count("node7\n"), 3)
        self.assertNotIn("nameserver", text)

    def test_nothing_of_the_hosts_variables_gets_in(self) -> None:
        os.environ["PLANTED_SECRET"] = "planted"
        self.addCleanup(os.environ.pop, "PLANTED_SECRET")
        self.assertNotIn("planted", self.out("env; cat /proc/1/environ 2>/dev/null; true"))

    def test_image_config_is_honoured(self) -> None:
        config = {"Env": ["A=image", "B=image"], "WorkingDir": "/var/tmp", "User": "0", "Unknown": 1}
        script = 'echo "$A $B $PWD $HOME"'
        text = self.out(script, config=config, env={"B": "request"}, check={"env": {"C": "check"}})
        self.assertEqual(text, "image request /var/tmp /root\n")

    def test_a_missing_working_folder_is_made(self) -> None:
        self.assertEqual(self.out("pwd", workdir="/not/there"), "/not/there\n")

    def test_an_unknown_uid_works(self) -> None:
        """B195."""
        text = self.out("id -u; id -g; echo $HOME", user="54321")
        self.assertEqual(text, "54321\n0\n/\n")

    def test_a_user_by_name(self) -> None:
        text = self.out("id -u; id -g; pwd; echo $HOME", user="someone")
        self.assertEqual(text, "1234\n1234\n/\n/home/someone\n")

    def test_an_ordinary_user_has_no_capability(self) -> None:
        self.assertIn("CapEff:\t0000000000000000", self.out("cat /proc/self/status", user="someone"))

    def test_an_unknown_user_is_an_error(self) -> None:
        receipt = self.run_checks({"name": "a", "argv": ["true"]}, user="nobody-here", status=125)
        self.assertEqual(receipt["checks"][0]["code"], "user.unknown")
        self.assertEqual(receipt["outcome"], "error")

    def test_binds(self) -> None:
        shared = self.folder / "shared"
        shared.mkdir(exist_ok=True)
        shared.chmod(0o777)
        (shared / "file").write_text("shared\n")
        binds = [
            {"source": str(shared), "target": "/mnt/ro"},
            {"source": str(shared), "target": "/mnt/rw", "read_only": False},
            {"source": str(shared / "file"), "target": "/a/file"},
        ]
        text = self.out("cat /mnt/ro/file /a/file; echo x > /mnt/rw/new; touch /mnt/ro/no 2>&1; true", binds=binds)
        self.assertEqual(text.split("\n")[:2], ["shared", "shared"])
        self.assertIn("Read-only", text)
        self.assertTrue((shared / "new").exists())
        self.assertFalse((shared / "no").exists())

    def test_a_folder_shows_at_a_second_place(self) -> None:
        """What the relocation check needs: one tree, two prefixes."""
        twins = [{"source": "/etc", "target": "/opt/second/etc"}]
        text = self.out("cat /opt/second/etc/group; touch /opt/second/etc/x 2>&1; true", check={"twins": twins})
        self.assertEqual(text.splitlines()[0], "root:x:0:")
        self.assertIn("Read-only", text)

    def test_only_folders_of_the_image_have_twins(self) -> None:
        """A second /proc would not be guarded as the first is."""
        for source in ("/proc", "/proc/sys", "/dev", "/tmp", "/etc/passwd", "/sys"):
            with self.subTest(source):
                check = self.shell("ls /second", check={"twins": [{"source": source, "target": "/second"}]})
                self.assertEqual((check["outcome"], check["code"]), ("error", "sandbox.twin"))

    def test_a_twin_of_the_root_shows_nothing_of_the_kernel(self) -> None:
        text = self.out("ls /second/proc /second/dev", check={"twins": [{"source": "/", "target": "/second"}]})
        self.assertNotIn("self", text)
        self.assertNotIn("null", text)

    def test_an_empty_home(self) -> None:
        """B154: an empty folder over /root."""
        self.assertEqual(self.out("ls -A /etc | wc -l; touch /etc/x", tmpfs=["/etc"]).strip(), "3")

    def test_sizes(self) -> None:
        """B177."""
        text = self.out("df -k /dev/shm /tmp", shm_size=4 << 20, tmp_size=2 << 20)
        self.assertIn(" 4096 ", text)
        self.assertIn(" 2048 ", text)

    def test_too_small_a_shm_stops_before_the_program(self) -> None:
        """B177."""
        check = self.shell("echo ran", shm_size=64 << 20, check={"shm": 1 << 30})
        self.assertEqual((check["outcome"], check["code"], check["stdout"]), ("error", "check.shm", None))
        self.assertIn(str(1 << 30), check["message"])

    def test_a_read_only_root(self) -> None:
        text = self.out("touch /x 2>&1; touch /tmp/x && touch /run/x && echo > /dev/null && echo fine", read_only=True)
        self.assertIn("Read-only", text)
        self.assertIn("fine", text)

    def test_limits(self) -> None:
        self.assertEqual(self.out("ulimit -n", rlimits={"nofile": 99}), "99\n")

    def test_a_limit_above_the_machine_s_is_named(self) -> None:
        receipt = self.run_checks({"name": "a", "argv": ["true"]}, rlimits={"nofile": 1 << 40})
        check = receipt["checks"][0]
        self.assertEqual((check["outcome"], check["code"]), ("error", "exec.limit"))
        self.assertIn("nofile", check["message"])

    def test_direct_writes_stay_and_placeholders_go(self) -> None:
        script = "echo kept > /home/kept; cat /proc/self/mountinfo > /dev/null"
        before = {p.relative_to(self.root) for p in self.root.rglob("*")}
        self.out(script, write="direct")
        after = {p.relative_to(self.root) for p in self.root.rglob("*")}
        (self.root / "home/kept").unlink()
        self.assertEqual(after - before, {Path("home/kept")})

    def test_the_root_can_have_an_awkward_path(self) -> None:
        """Overlay separates its options by characters that a path may hold."""
        place = self.folder / "a:b,c\\d e"
        os.rename(self.root, place)
        self.addCleanup(os.rename, place, self.root)
        self.assertEqual(self.out("echo here", root=str(place)), "here\n")

    def test_the_receipt_says_what_it_was(self) -> None:
        receipt = self.run_checks({"name": "a", "argv": ["true"]}, status=0)
        sandbox = receipt["sandbox"]
        self.assertEqual(sandbox["isolation"], self.isolation)
        self.assertLessEqual({"mount", "pid", "ipc", "uts", "network"}, set(sandbox["namespaces"]))
        self.assertEqual(receipt["host"]["kernel"], os.uname().release)
        self.assertIn(sandbox["enter"], ("pivot_root", "chroot"))


class AsRoot(Properties, SandboxCase):
    isolation = "root"

    def test_nodes_are_made(self) -> None:
        self.assertEqual(self.run_checks({"name": "a", "argv": ["true"]})["sandbox"]["devices"], "mknod")


class Rootless(Properties, SandboxCase):
    isolation = "rootless"

    def test_what_differs_is_said(self) -> None:
        sandbox = self.run_checks({"name": "a", "argv": ["true"]})["sandbox"]
        self.assertEqual(sandbox["devices"], "bind")
        self.assertIn("user", sandbox["namespaces"])
        self.assertTrue(sandbox["differs"])

    def test_files_made_by_root_inside_belong_to_the_user_outside(self) -> None:
        shared = self.folder / "mine"
        shared.mkdir()
        shared.chmod(0o777)
        self.out("touch /m/new", binds=[{"source": str(shared), "target": "/m", "read_only": False}])
        self.assertNotEqual((shared / "new").stat().st_uid, 0)


if __name__ == "__main__":
    unittest.main()
