"""The injected driver as programs in the sandbox find it; the GPUs are fakes (tests/device has the real ones)."""

from __future__ import annotations

import os
import shutil
import unittest
from typing import Any

from tests.chroot.fakegpu import UUIDS, VERSION, FakeMachine, have_compiler, library
from tests.chroot.lab import ORDINARY_UID, WAIT, SandboxCase
from tests.chroot.test_gpu import CDI_YAML

HOME = "/usr/local/nvidia"
LDCONFIG = next((p for p in ("/sbin/ldconfig.real", "/sbin/ldconfig") if os.access(p, os.X_OK)), "")


class Properties:
    def setUp(self) -> None:
        if not have_compiler() or not LDCONFIG or os.geteuid():
            self.skipTest("needs root, gcc and ldconfig to make a machine with fake GPUs")
        place = self.folder / self.id().rpartition(".")[2]
        place.mkdir()
        place.chmod(0o755)
        self.machine = FakeMachine(place / "machine")
        self.image = place / "image"
        shutil.copytree(self.root, self.image, symlinks=True)
        (self.image / "sbin").mkdir(exist_ok=True)
        shutil.copy(LDCONFIG, self.image / "sbin/ldconfig")
        self.gpu: dict[str, Any] = {"host": str(self.machine.root), "probe_timeout": WAIT}

    def start(self, request: dict[str, Any], **options: Any) -> Any:
        if self.isolation == "rootless":
            for path in (self.image, *self.image.rglob("*")):
                os.chown(path, ORDINARY_UID, ORDINARY_UID, follow_symlinks=False)
        return super().start(request, **options)

    def gpu_out(self, script: str, **changes: Any) -> str:
        return str(self.out(script, root=str(self.image), gpu=self.gpu, **changes))

    def gpu_code(self, **changes: Any) -> str:
        check = {"name": "gpu", "argv": ["true"]}
        receipt = self.run_checks(check, root=str(self.image), gpu=self.gpu, status=125, **changes)
        self.assertEqual(receipt["outcome"], "error")
        return str(receipt["error"]["code"] if receipt["error"] else receipt["checks"][0]["code"])

    def test_the_cache_lists_the_driver(self) -> None:
        """B170."""
        lines = [line.split() for line in self.gpu_out("/sbin/ldconfig -p").splitlines()]
        found = {line[0]: line[-1] for line in lines if len(line) > 3}
        self.assertEqual(found["libcuda.so.1"], f"{HOME}/lib64/libcuda.so.1")
        self.assertEqual(found["libnvidia-xyz.so.1"], f"{HOME}/lib64/libnvidia-xyz.so.1")

    def test_the_unversioned_link_and_its_variable(self) -> None:
        """B171."""
        text = self.gpu_out(f"readlink {HOME}/lib64/libcuda.so; echo $LIBRARY_PATH")
        self.assertEqual(text.split(), [f"libcuda.so.{VERSION}", f"{HOME}/lib64"])

    def test_nodes_of_the_chosen_gpu_only(self) -> None:
        self.gpu["devices"] = ["1"]
        text = self.gpu_out("stat -c '%n %t:%T' /dev/nvidia* /dev/nvidia-caps/* 2>/dev/null; true")
        self.assertIn("/dev/nvidia1 c3:1", text)
        self.assertIn("/dev/nvidia-uvm 1fd:0", text)
        self.assertIn("/dev/nvidia-caps/nvidia-cap1 1fe:1", text)
        self.assertNotIn("/dev/nvidia0 ", text)

    def test_the_driver_s_files_are_read_only(self) -> None:
        check = self.shell(f"echo x > {HOME}/lib64/libcuda.so.1", root=str(self.image), gpu=self.gpu)
        self.assertNotEqual(check["exit"], 0)

    def test_tools_are_found(self) -> None:
        self.assertEqual(self.gpu_out("nvidia-smi fake smi"), "fake smi\n")

    def test_the_receipt_names_driver_and_gpus(self) -> None:
        receipt = self.run_checks({"name": "a", "argv": ["true"]}, root=str(self.image), gpu=self.gpu, status=0)["gpu"]
        self.assertEqual((receipt["driver"], [g["uuid"] for g in receipt["gpus"]]), (VERSION, list(UUIDS)))
        self.assertEqual(receipt["probe"]["devices"][0]["capability"], "10.0")
        self.assertEqual(receipt["source"], "loader cache")

    def test_a_newer_library_of_the_image_is_reported_and_not_used(self) -> None:
        """B164."""
        library(self.image / "usr/lib/libnvidia-ml.so.999", "libnvidia-ml.so.1")
        library(self.image / "usr/lib/libcuda.so.999.1", "libcuda.so.1")
        (self.image / "usr/lib/libcuda.so.1").symlink_to("libcuda.so.999.1")
        receipt = self.run_checks({"name": "a", "argv": ["/sbin/ldconfig", "-p"]}, root=str(self.image), gpu=self.gpu)
        notes = " ".join(receipt["sandbox"]["notes"])
        self.assertIn("libcuda.so.999.1, libnvidia-ml.so.999 in /usr/lib;", notes)
        first = next(t for t in receipt["checks"][0]["stdout"]["text"].splitlines() if "libcuda.so.1 " in t)
        self.assertIn(HOME, first)

    def test_a_libcuda_in_ld_library_path_is_an_error(self) -> None:
        library(self.image / "opt/stubs/libcuda.so.1", "libcuda.so.1")
        self.assertEqual(self.gpu_code(env={"LD_LIBRARY_PATH": "/nowhere:/opt/stubs"}), "gpu.shadowed")

    def test_a_compat_folder_in_the_image_does_not_win(self) -> None:
        """B167, with the loader configured as CUDA images have it."""
        compat = self.image / "usr/local/cuda-13.0/compat"
        library(compat / "libcuda.so.570.1.1", "libcuda.so.1")
        (compat / "libcuda.so.1").symlink_to("libcuda.so.570.1.1")
        (self.image / "etc/ld.so.conf.d").mkdir()
        (self.image / "etc/ld.so.conf.d/000-cuda.conf").write_text("/usr/local/cuda-13.0/compat\n")
        (self.image / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
        lines = self.gpu_out("/sbin/ldconfig -p").splitlines()
        self.assertIn(HOME, next(line for line in lines if "libcuda.so.1 " in line))
        self.assertEqual(self.gpu_code(env={"LD_LIBRARY_PATH": "/usr/local/cuda-13.0/compat"}), "gpu.shadowed")

    def test_other_ways_to_hide_the_driver(self) -> None:
        """Whatever the loader takes before its cache."""
        library(self.image / "opt/stubs/libcuda.so.1", "libcuda.so.1")
        library(self.image / "opt/v/glibc-hwcaps/x86-64-v2/libcuda.so.1", "libcuda.so.1")
        for env in ({"LD_PRELOAD": "/opt/none.so /opt/stubs/libcuda.so.1"}, {"LD_LIBRARY_PATH": "/opt/none;/opt/v"}):
            with self.subTest(env):
                self.assertEqual(self.gpu_code(env=env), "gpu.shadowed")
        (self.image / "etc/ld.so.preload").write_text("# why\n/opt/none.so /opt/stubs/libcuda.so.1\n")
        self.assertEqual(self.gpu_code(), "gpu.shadowed")

    def test_compat_on_an_older_driver_when_asked_for(self) -> None:
        """B167."""
        compat = self.image / "usr/local/cuda/compat"
        library(compat / "libcuda.so.999.1", "libcuda.so.1")
        self.assertNotIn("compat", self.gpu_out("echo $LD_LIBRARY_PATH"))
        self.gpu["compat"] = True
        self.assertEqual(self.gpu_out("echo $LD_LIBRARY_PATH"), "/usr/local/cuda/compat\n")

    def test_the_image_s_own_driver_folder_is_covered(self) -> None:
        library(self.image / "usr/local/nvidia/lib64/libcuda.so.1", "libcuda.so.1")
        env = {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib:/usr/local/nvidia/lib64"}
        self.assertIn(VERSION, self.gpu_out(f"ls {HOME}/lib64", env=env))

    def test_an_image_without_ldconfig(self) -> None:
        (self.image / "sbin/ldconfig").unlink()
        self.assertEqual(self.gpu_out("echo $LD_LIBRARY_PATH"), f"{HOME}/lib64\n")

    def test_an_ldconfig_that_fails(self) -> None:
        (self.image / "sbin/ldconfig").write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
        self.assertEqual(self.gpu_code(), "gpu.ldcache")

    def test_an_ldconfig_that_lies(self) -> None:
        (self.image / "sbin/ldconfig").write_text("#!/bin/sh\n[ $1 = -p ] || echo > /run/chroot-exec/ld.so.cache\n")
        self.assertEqual(self.gpu_code(), "gpu.ldcache")

    def test_a_fabric_that_is_not_ready(self) -> None:
        """B163: nvidia-smi answers, CUDA does not."""
        for seconds in (3, 30):
            self.gpu["probe_timeout"] = seconds
            if (code := self.gpu_code(env={"CUDA_FAKE_INIT": "802"})) != "gpu.probe":
                break  # else there was no time for one answer
        self.assertEqual(code, "gpu.not_ready")

    def test_proc_is_named_when_the_driver_misses_it(self) -> None:
        """B161."""
        self.assertEqual(self.gpu_code(env={"CUDA_FAKE_INIT": "304"}), "gpu.proc")

    def test_no_device_is_a_failure(self) -> None:
        """B203."""
        self.assertEqual(self.gpu_code(env={"CUDA_FAKE_COUNT": "0"}), "gpu.none")

    def test_a_library_that_cuda_would_load_is_the_programs_own(self) -> None:
        """CUDA is asked by a process of the host's Python: nothing of the image may be loaded into that."""
        env = {"CUDA_INJECTION64_PATH": "/tmp/mine.so"}
        self.assertEqual(self.gpu_out("echo $CUDA_INJECTION64_PATH", env=env), "/tmp/mine.so\n")

    def test_fewer_devices_than_were_given(self) -> None:
        """One fell off the bus, or a control group forbids it: eight were asked for and paid for."""
        self.assertEqual(self.gpu_code(env={"CUDA_FAKE_COUNT": "1"}), "gpu.missing")
        self.gpu["devices"] = ["1"]
        self.assertEqual(self.gpu_out("echo one", env={"CUDA_FAKE_COUNT": "1"}), "one\n")

    def test_a_program_may_be_shown_fewer(self) -> None:
        env = {"CUDA_FAKE_COUNT": "1", "CUDA_VISIBLE_DEVICES": "0"}
        self.assertEqual(self.gpu_out("echo one", env=env), "one\n")

    def test_no_gpu_where_one_was_asked_for(self) -> None:
        shutil.rmtree(self.machine.root / "dev")
        shutil.rmtree(self.machine.root / "proc/driver")
        self.assertEqual(self.gpu_code(), "gpu.none")

    def test_more_gpus_than_were_given(self) -> None:
        self.gpu["devices"] = ["0"]
        check = self.shell("true", root=str(self.image), gpu=self.gpu, check={"gpus": 2})
        self.assertEqual((check["outcome"], check["code"]), ("error", "check.gpus"))

    def test_a_plain_file_at_a_node_in_the_image(self) -> None:
        """B159."""
        (self.image / "dev").mkdir(exist_ok=True)
        (self.image / "dev/nvidia-uvm-tools").write_text("a plain file")
        self.assertEqual(self.gpu_out("stat -c %F /dev/nvidia-uvm-tools"), "character special file\n")

    def test_by_cdi(self) -> None:
        self.machine.write("etc/cdi/nvidia.yaml", CDI_YAML)
        text = self.gpu_out("/sbin/ldconfig -p; readlink /usr/lib64/libcuda.so; echo $NVIDIA_VISIBLE_DEVICES")
        self.assertIn("=> /usr/lib64/libcuda.so.1\n", text)
        self.assertIn("\nlibcuda.so.1\nvoid\n", text)


class AsRoot(Properties, SandboxCase):
    isolation = "root"

    def test_a_program_links_with_the_driver(self) -> None:
        """B171: gcc -lcuda, in this machine's own system below an overlay."""
        script = (
            "echo 'int cuInit(unsigned); int main(void) { return cuInit(0); }' | gcc -xc - -lcuda -o /tmp/a && /tmp/a"
        )
        check = {"name": "link", "argv": ["/bin/sh", "-c", script]}
        receipt = self.run_checks(check, root="/", gpu=self.gpu, status=0)
        self.assertEqual(receipt["outcome"], "pass")


class Rootless(Properties, SandboxCase):
    isolation = "rootless"


if __name__ == "__main__":
    unittest.main()
