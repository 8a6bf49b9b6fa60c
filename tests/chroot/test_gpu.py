"""What is chosen for injection, on folders that stand for machines (group F of the field reports)."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chroot_exec import cudaprobe, drivers, elf, gpu, yamlsubset
from chroot_exec.errors import RunnerError
from chroot_exec.host import Host
from chroot_exec.protocol import Gpu
from tests.chroot.fakegpu import LIBRARY_FOLDER, UUIDS, VERSION, FakeMachine, have_compiler, library, script

CDI_YAML = f"""---
cdiVersion: "0.5.0"
kind: nvidia.com/gpu
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
  - path: /dev/nvidia-uvm
  env:
  - NVIDIA_VISIBLE_DEVICES=void
  hooks:
  - args:
    - nvidia-cdi-hook
    - create-symlinks
    - --link
    - libcuda.so.1::/usr/lib64/libcuda.so
    hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
  - args:
    - nvidia-cdi-hook
    - update-ldcache
    - --folder
    - /usr/lib64
    hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
  - {{}}
  mounts:
  - containerPath: /usr/lib64/libcuda.so.{VERSION}
    hostPath: /{LIBRARY_FOLDER}/libcuda.so.{VERSION}
    options: [] # read-only anyway
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
- containerEdits:
    deviceNodes:
    - hostPath: /dev/nvidia1
      path: /dev/nvidia1
      major: 195
      fileMode: 438
  name: '{UUIDS[1]}'
- name: all
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/nvidia1
"""


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from _paths(child, (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    out = copy.copy(value)
    out[path[0]] = _replaced(value[path[0]], path[1:], other)
    return out


@unittest.skipUnless(have_compiler(), "needs gcc to make driver libraries")
@unittest.skipIf(os.geteuid() != 0, "needs root to make device nodes")
class Discovery(unittest.TestCase):
    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        self.machine = FakeMachine(self.root)
        self.host = Host(str(self.root))

    def discover(self, *devices: str, source: str = "auto") -> gpu.Injection:
        return gpu.discover(Gpu(devices or ("all",), source, str(self.root)))

    def code(self, *devices: str, source: str = "auto") -> str:
        with self.assertRaises(RunnerError) as caught:
            self.discover(*devices, source=source)
        return caught.exception.code

    def numbers(self, *devices: str) -> dict[str, tuple[int, int]]:
        return {n.path: (n.major, n.minor) for n in self.discover(*devices).nodes}

    def names(self) -> list[str]:
        return [os.path.basename(p) for p in self.discover().libraries]

    def test_majors_are_the_running_kernels(self) -> None:
        """B158: 509 here, 510 there; a stale node's number is not believed."""
        self.machine.node("nvidia-uvm", 507, 0)
        self.assertEqual(self.numbers()["/dev/nvidia-uvm"], (509, 0))
        self.assertTrue(any("507" in n for n in self.discover().notes))

    def test_nodes_that_nobody_has_made_yet(self) -> None:
        """B158, in dry mode: everything from /proc/devices."""
        shutil.rmtree(self.root / "dev")
        numbers = self.numbers()
        self.assertEqual(numbers["/dev/nvidia-uvm"], (509, 0))
        self.assertEqual(numbers["/dev/nvidia1"], (195, 1))
        self.assertEqual(numbers["/dev/nvidiactl"], (195, 255))

    def test_a_container_s_own_gpus(self) -> None:
        """Its /proc lists the whole machine, its /dev has what it was given, which CUDA numbers from 0."""
        (self.root / "dev/nvidia0").unlink()
        found = gpu.discover(Gpu(host=str(self.root), devices=("all",)))
        self.assertEqual([(g.index, g.uuid) for g in found.gpus], [(0, UUIDS[1])])
        self.assertIn("1 GPUs of this machine have no node", " ".join(found.notes))

    def test_without_proc_devices_the_nodes_count(self) -> None:
        (self.root / "proc/devices").unlink()
        self.assertEqual(self.numbers()["/dev/nvidia-uvm"], (509, 0))

    def test_a_plain_file_where_a_node_should_be(self) -> None:
        """B159."""
        (self.root / "dev/nvidia-uvm-tools").unlink()
        (self.root / "dev/nvidia-uvm-tools").write_text("")
        self.assertEqual(self.code(), "device.type")

    def test_a_missing_optional_node_is_a_note(self) -> None:
        """B160."""
        injection = self.discover()
        self.assertNotIn("/dev/nvidia-modeset", [n.path for n in injection.nodes])
        self.assertTrue(any("nvidia-modeset" in n for n in injection.notes))

    def test_a_missing_required_node_stops(self) -> None:
        shutil.rmtree(self.root / "dev")
        (self.root / "proc/devices").write_text("")
        self.assertEqual(self.code(), "gpu.none")

    def test_caps_are_passed_or_the_switch_is_set(self) -> None:
        """B175."""
        self.assertIn("/dev/nvidia-caps/nvidia-cap1", self.numbers())
        self.assertEqual(self.discover().env, {})
        shutil.rmtree(self.root / "dev/nvidia-caps")
        injection = self.discover()
        self.assertEqual(injection.env, {"NCCL_NVLS_ENABLE": "0"})
        self.assertTrue(any("NCCL_NVLS_ENABLE" in n for n in injection.notes))

    def test_selection(self) -> None:
        for devices, minors in ((("all",), [0, 1]), (("1",), [1]), ((UUIDS[0],), [0]), (("1", "0", "1"), [1, 0])):
            with self.subTest(devices):
                injection = self.discover(*devices)
                self.assertEqual([g.minor for g in injection.gpus], minors)
                given = sorted(n.path for n in injection.nodes if n.path[11:].isdigit())
                self.assertEqual(given, sorted(f"/dev/nvidia{m}" for m in minors))

    def test_a_device_that_is_not_there(self) -> None:
        self.assertEqual(self.code("7"), "gpu.device")

    def test_zero_gpus_is_a_failure(self) -> None:
        """B203."""
        shutil.rmtree(self.root / "proc/driver/nvidia/gpus")
        for name in ("nvidia0", "nvidia1"):
            (self.root / "dev" / name).unlink()
        self.assertEqual(self.code(), "gpu.none")
        self.assertEqual(self.code(""), "gpu.none")

    def test_the_driver_s_own_set(self) -> None:
        """B173: a library that no list knows, by its version; others of the folder stay out."""
        library(self.machine.libraries / "libother.so.1.2.3", "libother.so.1")
        library(self.machine.libraries / "libnvidia-old.so.535.54.03", "libnvidia-old.so.1")
        self.assertEqual(self.names(), [f"lib{n}.so.{VERSION}" for n in ("cuda", "nvidia-ml", "nvidia-xyz")])

    def test_never_from_a_compat_folder(self) -> None:
        """B168: the cache lists compat first."""
        compat = self.root / "usr/local/cuda-13.0/compat"
        library(compat / f"libcuda.so.{VERSION}", "libcuda.so.1")
        plain = f"libcuda.so.1 (libc6,x86-64) => /{LIBRARY_FOLDER}/libcuda.so.1"
        self.machine.cache([f"libcuda.so.1 (libc6,x86-64) => /usr/local/cuda-13.0/compat/libcuda.so.{VERSION}", plain])
        self.assertFalse([p for p in self.discover().libraries if "compat" in p])

    def test_files_that_are_not_this_machine_s_libraries(self) -> None:
        (self.machine.libraries / f"libnvidia-text.so.{VERSION}").write_text("GROUP ( x )")
        data = bytearray((self.machine.libraries / f"libcuda.so.{VERSION}").read_bytes())
        data[4] = 1
        (self.machine.libraries / f"libnvidia-32.so.{VERSION}").write_bytes(data)
        self.assertEqual(len(self.names()), 3)

    def test_a_driver_folder_of_its_own(self) -> None:
        """Cloud machines keep the driver in /usr/local/nvidia, and no cache may list it."""
        (self.root / "usr/local/nvidia").mkdir(parents=True)
        os.rename(self.machine.libraries, self.root / "usr/local/nvidia/lib64")
        self.machine.cache([])
        self.assertEqual(len(self.names()), 3)

    def test_no_driver_library(self) -> None:
        shutil.rmtree(self.machine.libraries)
        self.assertEqual(self.code(), "gpu.libraries")

    def test_a_module_without_a_version_file(self) -> None:
        (self.root / "proc/driver/nvidia/version").unlink()
        self.assertEqual(self.discover().driver, VERSION)

    def test_tools_are_the_driver_s_own_and_no_wrappers(self) -> None:
        self.assertEqual(self.discover().tools, (str(self.root / "usr/bin/nvidia-smi"),))

    def test_nvidia_container_cli(self) -> None:
        self.machine.write("lib/firmware/nvidia/gsp.bin", "x")
        lines = [
            "/dev/nvidiactl",
            "/usr/bin/nvidia-smi",
            f"/{LIBRARY_FOLDER}/libcuda.so.{VERSION}",
            "/lib/firmware/nvidia/gsp.bin",
        ]
        script(self.root / "usr/bin/nvidia-container-cli", "test $1 = list && printf '%s\\n' " + " ".join(lines))
        injection = self.discover()
        self.assertEqual(injection.source, "nvidia-container-cli")
        self.assertEqual(len(injection.libraries), 3)
        self.assertEqual([t for _, t in injection.files], ["/lib/firmware/nvidia/gsp.bin"])

    def test_nvidia_container_cli_that_fails_falls_back(self) -> None:
        script(self.root / "usr/bin/nvidia-container-cli", "echo broken >&2; exit 1")
        self.assertEqual(self.discover().source, "loader cache")
        self.assertEqual(self.code(source="cli"), "gpu.source")

    def test_cdi(self) -> None:
        self.machine.write("etc/cdi/nvidia.yaml", CDI_YAML)
        injection = self.discover("0")
        self.assertEqual(injection.source, "cdi /etc/cdi/nvidia.yaml")
        self.assertEqual([n.path for n in injection.nodes], ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"])
        self.assertEqual([t for _, t in injection.files], [f"/usr/lib64/libcuda.so.{VERSION}"])
        self.assertEqual(injection.links, (("/usr/lib64/libcuda.so", "libcuda.so.1"),))
        self.assertEqual(injection.folders, ("/usr/lib64",))
        self.assertEqual(injection.env["NVIDIA_VISIBLE_DEVICES"], "void")
        self.assertEqual([g.uuid for g in injection.gpus], [UUIDS[0]])

    def test_a_uuid_may_be_begun_only(self) -> None:
        """CUDA_VISIBLE_DEVICES=GPU-2222 is what many write; of two that begin so neither is meant."""
        for cdi in (False, True):
            if cdi:
                self.machine.write("etc/cdi/nvidia.yaml", CDI_YAML)
            self.assertEqual([g.minor for g in self.discover("GPU-2222").gpus], [1])
            for device in ("GPU-3", "G", "2222", UUIDS[0] + "0"):
                self.assertEqual(self.code(device), "gpu.device", device)
            self.assertEqual([g.minor for g in self.discover(UUIDS[1], "GPU-2").gpus], [1])
        shutil.rmtree(self.root / "etc/cdi")
        self.assertEqual(self.code("GPU-"), "gpu.device")

    def test_cdi_all_and_by_uuid(self) -> None:
        self.machine.write("etc/cdi/nvidia.yaml", CDI_YAML)
        self.assertEqual([g.minor for g in self.discover().gpus], [0, 1])
        self.assertEqual([g.minor for g in self.discover(UUIDS[1]).gpus], [1])
        self.assertEqual(self.code("9"), "gpu.device")

    def test_cdi_names_by_the_other_strategy(self) -> None:
        """nvidia-ctk's --device-name-strategy: what was written by index is asked for by UUID, and the reverse."""
        self.machine.write("etc/cdi/nvidia.yaml", CDI_YAML)
        for asked, taken, minor in ((UUIDS[0], "0", 0), ("GPU-1111", "0", 0), ("1", UUIDS[1], 1)):
            injection = self.discover(asked)
            self.assertEqual([g.minor for g in injection.gpus], [minor], asked)
            self.assertIn(f"{taken} is taken, which has its node /dev/nvidia{minor}", " ".join(injection.notes))
        self.assertEqual([g.minor for g in self.discover(UUIDS[0], "0").gpus], [0])
        self.assertEqual(self.code("2"), "gpu.device")

    def test_cdi_a_part_of_a_gpu_is_not_the_gpu(self) -> None:
        """MIG: the device of a part has the node of its GPU, and a capability's."""
        value = yamlsubset.parse(CDI_YAML)
        del value["devices"][1]
        part = [{"path": "/dev/nvidia1"}, {"path": "/dev/nvidia-caps/nvidia-cap30"}]
        value["devices"].append({"name": "1:0", "containerEdits": {"deviceNodes": part}})
        self.machine.write("etc/cdi/nvidia.json", json.dumps(value))
        for asked in ("1", UUIDS[1]):
            self.assertEqual(self.code(asked), "gpu.device")

    def test_cdi_as_json_and_the_later_folder_wins(self) -> None:
        self.machine.write("etc/cdi/nvidia.yaml", CDI_YAML)
        value = yamlsubset.parse(CDI_YAML)
        value["devices"][0]["containerEdits"]["deviceNodes"] = [{"path": "/dev/nvidia1"}]
        self.machine.write("var/run/cdi/nvidia.json", json.dumps(value))
        self.assertEqual([g.minor for g in self.discover("0").gpus], [1])

    def test_cdi_of_another_machine(self) -> None:
        self.machine.write("etc/cdi/nvidia.yaml", CDI_YAML.replace(f"hostPath: /{LIBRARY_FOLDER}", "hostPath: /gone"))
        self.assertEqual(self.code("0"), "gpu.cdi")

    def test_cdi_that_cannot_be_read(self) -> None:
        self.machine.write("etc/cdi/nvidia.yaml", "kind: nvidia.com/gpu\ncdiVersion: &anchor x\n")
        self.assertEqual(self.code(), "gpu.cdi")

    def test_cdi_of_another_vendor_is_not_read(self) -> None:
        self.machine.write("etc/cdi/a.yaml", "cdiVersion: &anchor x\nkind: vendor.com/net\n")
        self.machine.write("etc/cdi/nvidia.yaml", CDI_YAML)
        self.assertEqual([g.minor for g in self.discover("0").gpus], [0])

    def test_cdi_two_specs_of_one_folder(self) -> None:
        """One device each is what they are for; the same device in two ways is nobody's guess."""
        value = yamlsubset.parse(CDI_YAML)
        self.machine.write("etc/cdi/nvidia.yaml", CDI_YAML)
        self.machine.write("etc/cdi/old.json", json.dumps(value))
        self.assertEqual([g.minor for g in self.discover("0").gpus], [0])
        value["devices"][0]["containerEdits"]["deviceNodes"] = [{"path": "/dev/nvidia1"}]
        self.machine.write("etc/cdi/old.json", json.dumps(value))
        self.assertEqual(self.code("0"), "gpu.cdi")

    def test_cdi_with_every_key_of_newer_versions(self) -> None:
        """What nvidia-ctk and others write from 0.3 to 1.0; what has no meaning here is passed over."""
        for version in ("0.3.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0"):
            value = yamlsubset.parse(CDI_YAML)
            value["cdiVersion"] = version
            value["annotations"] = {"a/b": "c"}
            edits = value["containerEdits"]
            edits.update(additionalGIDs=[44, 109], intelRdt={"closID": "x"}, netDevices=[])
            edits["deviceNodes"][0].update(type="c", major=195, minor=255, permissions="rwm", uid=0, gid=44, fileMode=438)
            edits["mounts"][0].update(options=["ro", "nosuid", "nodev", "rbind", "rprivate"], type="bind")
            edits.setdefault("hooks", []).append(
                {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "timeout": 3, "env": ["A=b"],
                 "args": ["nvidia-cdi-hook", "disable-device-node-modification"]}
            )  # fmt: skip
            self.machine.write("etc/cdi/nvidia.json", json.dumps(value))
            with self.subTest(version):
                self.assertEqual([g.minor for g in self.discover("0").gpus], [0])

    def test_cdi_of_other_shapes_gives_a_code(self) -> None:
        """Each value of a spec replaced by others: an injection or a code, nothing else."""
        value = yamlsubset.parse(CDI_YAML)
        odd: list[Any] = [None, [], {}, "", 0, True, "x", ["x"], [[1]], {"a": 1}, [None], "/../..", "/a\0b", "/", 10**99]
        for path in _paths(value):
            for other in odd:
                changed = _replaced(value, path, other)
                self.machine.write("etc/cdi/nvidia.json", json.dumps(changed))
                try:
                    self.discover("0")
                except RunnerError as error:
                    self.assertRegex(error.code, r"\A(gpu|device)\.", path)

    def test_soname(self) -> None:
        self.assertEqual(elf.soname(str(self.machine.libraries / f"libcuda.so.{VERSION}")), "libcuda.so.1")
        self.assertEqual(elf.soname("/etc/passwd"), "")


class Rules(unittest.TestCase):
    def test_compat_only_on_an_older_driver(self) -> None:
        """B167: below, equal, above."""
        compat = "580.95.05"
        self.assertEqual(
            [drivers.use_compat(d, compat) for d in ("535.54", "580.95.05", "590.1")], [True, False, False]
        )
        self.assertFalse(drivers.use_compat("", compat))
        self.assertFalse(drivers.use_compat("580.126.09", "580.95.05"))

    def test_meanings_of_cuda_errors(self) -> None:
        """B161, B163, B203: each names what to look at."""
        for status, code, word in ((802, "gpu.not_ready", "fabric not ready"), (304, "gpu.proc", "/proc"),
                                   (999, "gpu.init", "number"), (100, "gpu.none", "no device")):  # fmt: skip
            found = cudaprobe.judge({"cuInit": status, "devices": []})
            self.assertEqual(found[0], code)
            self.assertIn(word, found[1])
        self.assertEqual(cudaprobe.judge({"cuInit": 0, "devices": []})[0], "gpu.none")
        self.assertEqual(cudaprobe.judge({"cuInit": 0, "devices": [{}]}), ("", ""))


class Yaml(unittest.TestCase):
    def test_values(self) -> None:
        text = "a: 1\nb: 'it''s'\nc: \"x\\ty\"\nd:\n- 1\n- k: v\n  l: [] # note\n-\n  - deep\ne: {}\nf: a:b::c # x\n"
        text += "g:\nh: 0o17"
        value = {"a": 1, "b": "it's", "c": "x\ty", "d": [1, {"k": "v", "l": []}, ["deep"]], "e": {}, "f": "a:b::c",
                 "g": None, "h": 15}  # fmt: skip
        self.assertEqual(yamlsubset.parse(text), value)

    def test_dashes_in_plain_words(self) -> None:
        self.assertEqual(yamlsubset.parse("- --link\n- a::/b/c\n"), ["--link", "a::/b/c"])

    def test_what_is_not_read_is_refused(self) -> None:
        for text in ("a: &x 1", "a: *x", "a: |\n  x", "a: [1, 2]", "a: {b: 1}", "a: !!int 1", "a: 'x", "a: 1\na: 2",
                     "a:\n\t- 1", "a: 1\n    b: 2", 'a: "x', "a: 1\n- b"):  # fmt: skip
            with self.subTest(text), self.assertRaises(yamlsubset.YamlError):
                yamlsubset.parse(text)


if __name__ == "__main__":
    unittest.main()
