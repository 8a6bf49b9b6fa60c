"""Relocation's rules: bytes of one file in, bytes that work from any prefix out. ELF files need patchelf, and are not here."""

from __future__ import annotations

import os
import unittest

from bare import PYTHON, Case

from oci_builder.payload import relocate_rules as rules
from oci_builder.payload.relocate_rules import Prefixes

BUILT = Prefixes(((b"/build/rt", b""), (b"/uv/python-3.13", b"python")), b"/opt/rt")


class Rules(Case):
    def test_paths_into_the_tree_are_known_and_others_are_not(self) -> None:
        self.assertEqual(BUILT.inside(b"/uv/python-3.13/bin/python3"), b"python/bin/python3")
        for target in (b"/usr/bin/python3", b"/build/rt2/x", b"/build"):
            self.assertIsNone(BUILT.inside(target))

    def test_a_launcher_runs_from_wherever_it_stands(self) -> None:
        """Twice moved, through a link, and with a space in the path."""
        text = b"#!/build/rt/envs/base/bin/python -E\nimport sys\nprint(sys.argv[1])\n"
        made = rules.launcher(b"envs/base/bin/tool", text, BUILT)
        assert made
        for name in ("first", "second place"):
            bin_folder = self.place / name / "envs/base/bin"
            bin_folder.mkdir(parents=True)
            (bin_folder / "python").symlink_to(PYTHON)
            (bin_folder / "tool").write_bytes(made)
            (bin_folder / "tool").chmod(0o755)
            (self.place / "link").unlink(missing_ok=True)
            (self.place / "link").symlink_to(bin_folder / "tool")
            for program in (bin_folder / "tool", self.place / "link"):
                self.assertEqual(self.call(program, "said").stdout, "said\n")

    def test_every_rule_leaves_its_own_result_alone(self) -> None:
        launcher = rules.launcher(b"bin/x", b"#!/build/rt/bin/python3\n", BUILT)
        assert launcher
        self.assertIsNone(rules.launcher(b"bin/x", launcher, BUILT))
        self.assertIsNone(rules.configuration(b"prefix=/opt/rt\n", BUILT))
        self.assertIsNone(rules.path_file(b"lib/x.pth", b"../src\n", BUILT))
        self.assertIsNone(rules.runpath(b"lib/x.so", ("$ORIGIN/../y",), BUILT, ()))

    def test_configuration_names_the_final_prefix_and_no_neighbour(self) -> None:
        data = b"a=/build/rt\nb=/build/rt/lib\nc=/build/rt-other/lib\nd=/uv/python-3.13/include\n"
        self.assertEqual(
            rules.configuration(data, BUILT), b"a=/opt/rt\nb=/opt/rt/lib\nc=/build/rt-other/lib\nd=/opt/rt/python/include\n"
        )

    def test_venv_settings_lose_what_names_the_build_machine(self) -> None:
        for version in ("3.13.1", "3.12.3"):
            data = f"home = /uv/python-3.13/bin\nversion_info = {version}\nexecutable = /build/rt/x\n".encode()
            wanted = f"version_info = {version}\n".encode()
            self.assertEqual(rules.venv_settings(data, BUILT, b"python/bin"), wanted)

    def test_path_files_point_beside_themselves(self) -> None:
        made = rules.path_file(b"lib/site/a.pth", b"/build/rt/source\n/elsewhere\nimport x\n", BUILT)
        self.assertEqual(made, b"../../source\n/elsewhere\nimport x\n")

    def test_search_paths_are_relative_and_strays_are_gone(self) -> None:
        entries = ("/build/rt/lib", "/home/somebody/lib", "/usr/lib", "lib", "", "$ORIGIN")
        self.assertEqual(rules.runpath(b"envs/a/x.so", entries, BUILT, ("/usr/lib",)), "$ORIGIN/../../lib:/usr/lib:$ORIGIN")

    def test_an_install_record_that_names_the_build_machine_is_known(self) -> None:
        self.assertTrue(rules.is_local_origin(b'{"url": "file:///build/rt/src"}', BUILT))
        self.assertFalse(rules.is_local_origin(b'{"url": "https://example.org/x.whl"}', BUILT))
        self.assertTrue(rules.is_local_origin(b"no json /build/rt", BUILT))

    def test_the_rules_import_no_other_package(self) -> None:
        code = (
            "import sys; before = {m for m in sys.modules}; sys.path.insert(0, %r); import oci_builder.payload.relocate_rules;"
            "new = {m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names); print(*sorted(new))"
        )
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        self.assertEqual(self.call(PYTHON, "-I", "-S", "-c", code % root).stdout, "oci_builder\n")


if __name__ == "__main__":
    unittest.main()
