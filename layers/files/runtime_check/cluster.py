"""Does every node of the running Ray cluster have the same runtime under the same absolute path?"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime_check.rows import Row, row

_CLUSTER = """
import json, os, socket, sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
prefix = sys.argv[1]
def ask(prefix):
    import hashlib, json, os, socket, sys
    def read(path):
        try:
            with open(path, "rb") as file: return file.read()
        except OSError: return b""
    record = json.loads(read(os.path.join(prefix, ".nrl-install/installed.json")) or b"{}")
    root = os.environ.get("NEMO_RL_PREBUILT_ENV_ROOT", "")
    inventories = b"".join(read(os.path.join(prefix, "inventory-%s.json" % t)) for t in ("base", "automodel", "vllm"))
    return {"host": socket.gethostname(), "there": os.path.isdir(os.path.join(prefix, "envs")),
            "sha256": record.get("sha256", ""), "inventories": hashlib.sha256(inventories).hexdigest(),
            "executable": sys.executable, "python": sys.version.split()[0],
            "root": root, "same": os.path.realpath(root) == os.path.realpath(os.path.join(prefix, "envs")),
            "driver": read("/proc/driver/nvidia/version").decode("utf-8", "replace").partition("\\n")[0]}
ray.init(address="auto", log_to_driver=False)
nodes = [n for n in ray.nodes() if n["Alive"]]
task = ray.remote(num_cpus=0)(ask)
answers = {}
for node in nodes:
    where = On(node_id=node["NodeID"], soft=False)
    try: answer = ray.get(task.options(scheduling_strategy=where).remote(prefix), timeout=120)
    except Exception as error: answer = {"host": node.get("NodeManagerHostname", "?"), "error": str(error)[-300:]}
    answers[node["NodeID"]] = answer
print("\\n" + json.dumps(answers))
"""


def cluster_rows(prefix: Path) -> list[Row]:
    """Ask every living node of the running cluster."""
    argv = [str(prefix / "envs/base/bin/python"), "-B", "-c", _CLUSTER, str(prefix)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    try:
        answers: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return [row("cluster", False, f"no answer from a running Ray cluster: {done.stderr.strip()[-400:]}")]
    return judge_cluster(prefix, answers)


def judge_cluster(prefix: Path, answers: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """One row a node, and one for whether they are the same."""
    rows = []
    for node, answer in sorted(answers.items()):
        root = str(answer.get("root", "")).rstrip("/")
        wrong = str(answer.get("error", ""))
        if not wrong and not answer.get("there"):
            wrong = f"no runtime at {prefix}"
        elif not wrong and root != f"{prefix}/envs" and not (root and answer.get("same")):
            wrong = f"its raylet was not started from a shell activated there (NEMO_RL_PREBUILT_ENV_ROOT={root!r})"
        reason = wrong or str(answer.get("executable"))
        rows.append(row(f"node:{answer.get('host', node)}", not wrong, reason, **answer))
    if not answers:
        return [row("cluster", False, "the cluster has no living node")]
    reasons = []
    for key in ("sha256", "inventories", "python", "executable"):
        found = {str(a.get(key)) for a in answers.values()}
        if len(found) > 1:
            reasons.append(f"{key} differs: {', '.join(sorted(found))}")
    return [*rows, row("cluster", not reasons, "; ".join(reasons) or f"{len(answers)} nodes, one runtime at {prefix}")]
