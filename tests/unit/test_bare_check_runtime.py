"""check_runtime.py and nrl-run-record as programs: readable and JSON answers, and a record that is never written anew."""

from __future__ import annotations

import json
import shutil
import unittest

from bare import FILES, PYTHON, Case


class CheckRuntime(Case):
    def setUp(self) -> None:
        super().setUp()
        self.root = self.place / "rt"
        (self.root / "envs/base/bin").mkdir(parents=True)
        for name in ("check_runtime.py", "nrl-run-record"):
            shutil.copy(FILES / name, self.root)
        shutil.copytree(FILES / "runtime_check", self.root / "runtime_check")

    def test_it_answers_in_json_with_a_status_that_agrees(self) -> None:
        done = self.call(PYTHON, "-I", "-S", self.root / "check_runtime.py", "--json", "-")
        value = json.loads(done.stdout)
        self.assertEqual(value["ok"], done.returncode == 0)
        names = {check["name"]: check["outcome"] for check in value["checks"]}
        self.assertTrue(names)
        self.assertLessEqual(set(names.values()), {"pass", "fail", "deferred", "skipped", "error"})

    def test_a_gpu_that_is_asked_for_and_absent_fails(self) -> None:
        """B203: zero GPUs is a failure, not a skip."""
        done = self.call(PYTHON, "-I", "-S", self.root / "check_runtime.py", "--gpu", "--json", "-")
        self.assertEqual((done.returncode, json.loads(done.stdout)["ok"]), (1, False))

    def test_wrong_words_are_exit_2_and_no_traceback(self) -> None:
        done = self.call(PYTHON, "-I", "-S", self.root / "check_runtime.py", "--no-such-option")
        self.assertEqual((done.returncode, "Traceback" in done.stderr), (2, False))

    def test_a_record_says_what_ran_and_is_never_written_anew(self) -> None:
        source = self.root / "source"
        (source / "nemo_rl").mkdir(parents=True)
        (source / "SOURCE.json").write_text(json.dumps({"commit": "81" * 20}))
        out = self.place / "record.json"
        argv = [PYTHON, "-I", "-S", self.root / "nrl-run-record", "--out", out, "--run-id", "r1",
                "--data", "squad=0123abc", "--image", "sha256:" + "ab" * 32]  # fmt: skip
        env = {"NRL_RUNTIME_ROOT": str(self.root), "NEMO_RL_SOURCE_ROOT": str(source), "PYTHONPATH": str(source)}
        done = self.call(*argv, **env)
        self.assertEqual(done.returncode, 0, done.stderr)
        before = out.read_text()
        self.assertIn("81" * 20, before)
        self.assertEqual((self.call(*argv, **env).returncode, out.read_text()), (6, before))


if __name__ == "__main__":
    unittest.main()
