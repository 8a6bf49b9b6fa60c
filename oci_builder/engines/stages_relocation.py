"""The check ``relocation`` on CPUs: every tier starts from two prefixes and loads nothing from the other one.

Used where a gate of the spec asks for it and the image's own list has none: the shipped check of that name computes on
a GPU. The runtime shows a second time in the sandbox; its interpreters run from both places, with an environment that
names only the place they run from.
"""

from __future__ import annotations

from collections.abc import Sequence

from chroot_exec.protocol import Check, Twin

NAME = "relocation"

# Run by the first tier's interpreter; the standard library only. Every word that a check needs comes as an argument.
_JUDGE = r"""
import json, os, subprocess, sys
PROBE = '''
import glob, importlib, json, os, sys, sysconfig
site = sysconfig.get_path("purelib")
names = {os.path.basename(p).split(".")[0] for p in glob.glob(site + "/*/__init__.py")}
loaded = []
for name in ("numpy", "torch", "ssl", "sqlite3", "ctypes"):
    if name in names or name in ("ssl", "sqlite3", "ctypes"):
        try:
            importlib.import_module(name)
            loaded.append(name)
        except ImportError as error:
            if name in names:
                raise
maps = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if line.count("/")}
print(json.dumps({"prefix": sys.prefix, "path": [p for p in sys.path if p], "maps": sorted(maps), "loaded": loaded}))
'''
first, second, tiers = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
wrong, details = [], {}
for here, there in ((first, second), (second, first)):
    env = {name: value.replace(there, here) for name, value in os.environ.items()}
    for tier in tiers:
        python = f"{here}/envs/{tier}/bin/python3"
        try:
            done = subprocess.run([python, "-B", "-c", PROBE], env=env, capture_output=True, text=True, timeout=240)
        except (OSError, subprocess.TimeoutExpired) as error:
            wrong.append(f"{python} does not run: {error}")
            continue
        try:
            found = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            wrong.append(f"{python} ended with {done.returncode}: {done.stderr[-300:]}")
            continue
        if found["prefix"] != f"{here}/envs/{tier}":
            wrong.append(f"{python} says that its prefix is {found['prefix']}")
        foreign = [p for p in found["path"] + found["maps"] if p == there or p.startswith(there + "/")]
        if foreign:
            wrong.append(f"{python} uses {foreign[0]} of the other prefix ({len(foreign)} in all)")
        details[python] = {"loaded": found["loaded"], "files": len(found["maps"])}
outcome = "fail" if wrong else "pass"
print(json.dumps({"outcome": outcome, "reason": "; ".join(wrong)[:2000], "details": details}))
sys.exit(bool(wrong))
"""


def with_relocation(checks: Sequence[Check], prefix: str, tiers: Sequence[str], wanted: bool) -> Sequence[Check]:
    """The checks, with the one of this file where a gate wants it and nobody else brings it."""
    if not wanted or any(check.name == NAME for check in checks):
        return checks
    # No prefix of one may be a prefix of the other's name: environments are rewritten from one to the other.
    second = f"/second-prefix{prefix}"
    argv = (f"{prefix}/envs/{tiers[0]}/bin/python3", "-B", "-c", _JUDGE, prefix, second, ",".join(tiers))
    return [*checks, Check(NAME, argv, result="json", timeout=900.0, twins=(Twin(prefix, second),))]
