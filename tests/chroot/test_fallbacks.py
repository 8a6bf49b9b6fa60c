"""Machines that refuse something: each fallback works, and the receipt says that it was taken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import unittest
from typing import Any

from tests.chroot.lab import ORDINARY_UID, WAIT, SandboxCase

NO_PIVOT = """
def refuse(*_): raise OSError(22, "Invalid argument")
syscalls.pivot_root = refuse
"""
NO_FILE_SYSTEM = """
real = syscalls.mount
def mount(source, target, kind, *rest):
    if kind == {kind!r}: raise OSError(1, "Operation not permitted")
    return real(source, target, kind, *rest)
syscalls.mount = mount
"""
NO_MKNOD = """
import os
def mknod(*_, **__): raise PermissionError(1, "Operation not permitted")
os.mknod = mknod
"""
OLD_KERNEL = """
def refuse(*_): raise OSError(38, "Function not implemented")
syscalls.make_read_only = refuse
"""
NO_ATTRIBUTES = """
import os
def refuse(*_, **__): raise OSError(95, "Operation not supported")
os.setxattr = refuse
"""
SCRIPT = "echo > /dev/null && head -c 1 /dev/zero | wc -c && ls /proc/self/fd > /dev/null && cat /sys/class/net/lo/mtu"


class Fallbacks(SandboxCase):
    isolation = "root"

    def run_patched(self, patch: str, script: str = SCRIPT, status: int = 0, **changes: Any) -> dict[str, Any]:
        """A receipt of a runner that has been patched before it starts."""
        request = self.request(checks=[{"name": "a", "argv": ["/bin/sh", "-c", script]}], **changes)
        (self.folder / "request.json").write_text(json.dumps(request))
        code = f"import sys\nfrom chroot_exec import syscalls\n{patch}\nfrom chroot_exec.__main__ import main\n"
        code += f"sys.exit(main([{str(self.folder / 'request.json')!r}]))"
        done = subprocess.run([self.python, "-c", code], cwd=self.folder, capture_output=True, text=True, timeout=WAIT)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def test_where_nothing_can_be_mounted_the_reason_is_said(self) -> None:
        """Docker's AppArmor profile refuses mount(2) whatever capabilities a container has."""
        receipt = self.run_patched(NO_FILE_SYSTEM.format(kind=""), status=125)
        self.assertEqual(receipt["checks"][0]["code"], "sandbox.mount")
        self.assertIn("apparmor", receipt["checks"][0]["message"])

    def test_nothing_of_the_image_is_imported(self) -> None:
        """What a standard library loads late would come from where it lay on the host: now the image has a say there."""
        patch = "import sys\nfrom chroot_exec import identity\nreal = identity.read_identity\n"
        patch += "def late(*given):\n    import late_module\n    return real(*given)\nidentity.read_identity = late\n"
        patch += "sys.path.append('/usr/lib')"
        (self.root / "usr/lib/late_module.py").write_text("import os\nos.write(2, b'of the image')\n")
        self.addCleanup((self.root / "usr/lib/late_module.py").unlink)
        check = self.run_patched(patch, status=125)["checks"][0]
        self.assertEqual(check["code"], "sandbox.internal")
        self.assertIn("No module named 'late_module'", check["message"])

    def test_chroot_where_pivot_root_is_refused(self) -> None:
        receipt = self.run_patched(NO_PIVOT)
        self.assertEqual(receipt["sandbox"]["enter"], "chroot")
        self.assertIn("pivot_root", " ".join(receipt["sandbox"]["notes"]))

    def test_chroot_cannot_be_left(self) -> None:
        """Without CAP_SYS_CHROOT the old way out of a chroot is closed."""
        receipt = self.run_patched(NO_PIVOT, "mkdir /x; chroot /x /bin/true 2>&1; cat /proc/self/status; ls /")
        text = receipt["checks"][0]["stdout"]["text"]
        capabilities = next(line for line in text.splitlines() if line.startswith("CapEff"))
        self.assertEqual(int(capabilities.split()[1], 16) >> 18 & 1, 0)
        self.assertIn("not permitted", text)

    def test_without_an_overlay_the_tree_is_read_only_and_says_so(self) -> None:
        """Else a check could change what the next one, and other runs, find in the same tree."""
        before = sorted((p.relative_to(self.root), p.lstat().st_size) for p in self.root.rglob("*"))
        script = f"{SCRIPT}; echo x >> /etc/passwd; echo x > /new; pwd > /tmp/x && cat /tmp/x"
        receipt = self.run_patched(NO_FILE_SYSTEM.format(kind="overlay"), script, workdir="/not/there/yet")
        self.assertEqual(receipt["sandbox"]["root"], "read-only")
        self.assertIn("no overlay", " ".join(receipt["sandbox"]["notes"]))
        check = receipt["checks"][0]
        self.assertEqual(check["stderr"]["text"].count("Read-only"), 2)
        self.assertTrue(check["stdout"]["text"].endswith("/not/there/yet\n"))
        self.assertEqual(sorted((p.relative_to(self.root), p.lstat().st_size) for p in self.root.rglob("*")), before)

    def test_bound_nodes_where_mknod_is_refused(self) -> None:
        receipt = self.run_patched(NO_MKNOD, "stat -c %F%t:%T /dev/null /dev/full; " + SCRIPT)
        self.assertEqual(receipt["sandbox"]["devices"], "bind")
        self.assertIn("character special file1:3", receipt["checks"][0]["stdout"]["text"])

    def test_the_hosts_proc_where_a_new_one_is_refused(self) -> None:
        receipt = self.run_patched(NO_FILE_SYSTEM.format(kind="proc"), "head -c 1 /dev/zero")
        self.assertEqual(receipt["sandbox"]["proc"], "host")
        self.assertIn("/proc is the host's", " ".join(receipt["sandbox"]["notes"]))

    def test_the_hosts_sysfs_read_only_where_a_new_one_is_refused(self) -> None:
        receipt = self.run_patched(NO_FILE_SYSTEM.format(kind="sysfs"), SCRIPT + "; ! echo 1 2>/dev/null > /sys/x")
        self.assertEqual(receipt["sandbox"]["sys"], "host")

    def test_read_only_binds_on_an_old_kernel(self) -> None:
        binds = [{"source": str(self.root / "etc"), "target": "/mnt/etc"}]
        receipt = self.run_patched(OLD_KERNEL, "touch /mnt/etc/x 2>&1; true", binds=binds)
        self.assertIn("Read-only", receipt["checks"][0]["stdout"]["text"])

    def test_memory_without_user_attributes(self) -> None:
        """Rootless before Linux 6.6: the kernel's words alone name neither the cause nor a way out."""
        said = "echo 'mkdir: cannot create directory: Input/output error' >&2; exit 1"
        for isolation, script, noted, hinted in (
            ("rootless", said, True, True), ("rootless", "exit 1", True, False), ("root", said, False, False),
        ):  # fmt: skip
            receipt = self.run_patched(NO_ATTRIBUTES, script, 1, isolation=isolation)
            notes = [n for n in receipt["sandbox"]["notes"] if n.startswith("[sandbox.attributes] ")]
            self.assertEqual(bool(notes), noted)
            message = receipt["checks"][0]["message"]
            self.assertEqual("[sandbox.attributes]" in message, hinted, message)
            self.assertTrue(message.startswith("exit status 1, expected 0"))

    def test_the_note_is_there_exactly_where_it_is_so(self) -> None:
        """A folder of the image that is made anew, as an upgrade in place does it."""
        script = "rm -r /home && mkdir /home && echo made || echo not"
        receipt = self.run_patched("", script, isolation="rootless")
        noted = any(n.startswith("[sandbox.attributes] ") for n in receipt["sandbox"]["notes"])
        self.assertEqual(receipt["checks"][0]["stdout"]["text"], "not\n" if noted else "made\n")

    def test_rootless_as_root_keeps_all_ids(self) -> None:
        receipt = self.run_patched("", "stat -c %u /etc/passwd; id -u", isolation="rootless", user="1234")
        self.assertEqual(receipt["checks"][0]["stdout"]["text"], "0\n1234\n")
        self.assertEqual(receipt["sandbox"]["ids"], "identity")


@unittest.skipUnless(shutil.which("newuidmap"), "needs newuidmap")
class Subordinate(SandboxCase):
    isolation = "rootless"

    def ranged(self, users: str, groups: str) -> Any:
        """The receipt of a check that an ordinary user runs, with these lines in /etc/subuid and /etc/subgid."""
        if os.geteuid():
            self.skipTest("needs root to give an ordinary user a range")
        check = {"name": "a", "argv": ["/bin/sh", "-c", "id -u; cat /proc/self/uid_map"]}
        request = self.folder / "sub.json"
        request.write_text(json.dumps(self.request(checks=[check], user="someone")))
        names = f"root:x:0:0::/:/bin/sh\nranged:x:{ORDINARY_UID}:{ORDINARY_UID}::/:/bin/sh\n"
        # In a mount namespace of its own, so that this machine's /etc stays as it is.
        script = ""
        for name, text in (("subuid", users), ("subgid", groups), ("passwd", names)):
            (self.folder / name).write_text(text)
            script += f"mount --bind {self.folder / name} /etc/{name} && "
        script += (
            f"exec setpriv --reuid {ORDINARY_UID} --regid {ORDINARY_UID} --clear-groups {self.python} "
            f"-m chroot_exec {request}"
        )
        command = ["unshare", "-m", "sh", "-c", script]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=WAIT)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return json.loads(done.stdout)

    def test_ids_of_etc_subuid(self) -> None:
        """With newuidmap a user of the image exists in the sandbox's own map, without another user namespace."""
        receipt = self.ranged("ranged:200000:65536\n", "ranged:200000:65536\n")
        self.assertEqual(receipt["sandbox"]["ids"], "subordinate")
        lines = receipt["checks"][0]["stdout"]["text"].splitlines()
        self.assertEqual(lines[0], "1234")
        self.assertEqual(
            [line.split() for line in lines[1:]], [["0", str(ORDINARY_UID), "1"], ["1", "200000", "65536"]]
        )

    def test_a_range_of_users_alone(self) -> None:
        """An /etc/subgid that nobody has filled: no more than the own id is mapped, and it runs all the same."""
        receipt = self.ranged("ranged:200000:65536\n", "other:200000:65536\n")
        self.assertEqual((receipt["sandbox"]["ids"], receipt["outcome"]), ("single", "pass"))

    def test_settings_that_forbid_namespaces(self) -> None:
        """In a user namespace whose own settings forbid more of them: a code, and which setting it is."""
        request = self.folder / "forbidden.json"
        request.write_text(json.dumps(self.request(exec=["true"])))
        request.chmod(0o644)
        for kind, code in (("user", "sandbox.userns"), ("net", "sandbox.namespace"), ("pid", "sandbox.namespace")):
            with self.subTest(kind):
                setting = f"max_{kind}_namespaces"
                script = f"echo 0 > /proc/sys/user/{setting} && exec {self.python} -m chroot_exec {request}"
                command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
                done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, **self._user())
                self.assertEqual(done.returncode, 125, done.stderr)
                self.assertIn(f"[{code}]", done.stderr)
                self.assertRegex(done.stderr, r"sysctl user\.max_(user_namespaces is 0|\*_namespaces is reached)")


if __name__ == "__main__":
    unittest.main()
