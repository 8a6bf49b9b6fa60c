"""activate.sh in bash (and zsh, where it is): what it sets, keeps and gives back."""

from __future__ import annotations

import json
import shutil
import unittest

from bare import FILES, PYTHON, Case

DUMP = f"{PYTHON} -I -c 'import json, os; print(json.dumps(dict(os.environ)))'"


class Activate(Case):
    def setUp(self) -> None:
        super().setUp()
        self.root = self.place / "rt"
        (self.root / "envs/base/bin").mkdir(parents=True)
        (self.root / "envs/base/bin/python").symlink_to(PYTHON)
        (self.root / "source/nemo_rl").mkdir(parents=True)
        (self.root / "cuda").mkdir()
        shutil.copy(FILES / "activate.sh", self.root)
        self.shells = [["bash", "-eu"], *([["zsh", "-f", "-eu"]] if shutil.which("zsh") else [])]

    def environment(self, shell: list[str], script: str, **env: str) -> dict[str, str]:
        done = self.call(*shell, "-c", f"{script}; {DUMP}", HOME=str(self.place), **env)
        self.assertEqual(done.returncode, 0, done.stderr)
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return {k: v for k, v in found.items() if k not in ("_", "SHLVL", "OLDPWD", "PWD")}

    def test_it_sets_the_runtime_and_offline(self) -> None:
        for shell in self.shells:
            with self.subTest(shell[0]):
                env = self.environment(shell, f". {self.root}/activate.sh", CUDA_VISIBLE_DEVICES="3,5")
                self.assertEqual(env["NEMO_RL_PREBUILT_ENV_ROOT"], f"{self.root}/envs")
                self.assertEqual(env["PATH"].split(":")[0], f"{self.root}/envs/base/bin")
                self.assertEqual((env["CUDA_VISIBLE_DEVICES"], env["HF_HUB_OFFLINE"]), ("3,5", "1"))

    def test_caches_are_outside_the_prefix(self) -> None:
        env = self.environment(["bash"], f". {self.root}/activate.sh", NRL_CACHE_ROOT=f"{self.place}/cache")
        inside = {k for k, v in env.items() if "CACHE" in k and v.startswith(f"{self.root}/")}
        self.assertEqual(inside, set())
        self.assertTrue(env["TRITON_CACHE_DIR"].startswith(f"{self.place}/cache/"))

    def test_twice_is_once_and_deactivating_gives_everything_back(self) -> None:
        for shell in self.shells:
            with self.subTest(shell[0]):
                source = f". {self.root}/activate.sh"
                self.assertEqual(self.environment(shell, f"{source}; {source}"), self.environment(shell, source))
                plain = self.environment(shell, ":", PYTHONHOME="/x")
                self.assertEqual(self.environment(shell, f"{source}; deactivate_nrl", PYTHONHOME="/x"), plain)

    def test_what_cannot_work_is_refused(self) -> None:
        for env in ({"NEMO_RL_PY_EXECUTABLES_SYSTEM": "1"}, {"NEMO_RL_SOURCE_ROOT": "/nonexistent"}):
            with self.subTest(env):
                done = self.call("bash", "-c", f". {self.root}/activate.sh", **env)
                self.assertEqual(done.returncode, 2)
                self.assertIn("activate.sh:", done.stderr)


if __name__ == "__main__":
    unittest.main()
