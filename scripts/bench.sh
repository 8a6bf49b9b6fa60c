#!/bin/bash
# The table of `make bench`: makes the tiers of an example (uv, once), then measures ours and the others on them.
#   BENCH_SPEC=FILE   another spec than the real one; without 60 GB of free disk the quickstart's is taken
#   BENCH_WORK=DIR    where it all lies (default: build/bench); words after the command go to bench/run.py
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
work=${BENCH_WORK:-build/bench}
mkdir -p "$work"

spec=${BENCH_SPEC:-examples/nemo-rl/spec.json}
free=$(df --output=avail -B G "$work" | tail -n 1 | tr -dc 0-9)
if [ -z "${BENCH_SPEC:-}" ] && [ "$free" -lt 60 ]; then
  spec=examples/quickstart/spec.json
  echo "bench: $free GB of free disk are too few for the real tiers; taking $spec" >&2
fi
tiers=$("$python" - "$spec" "$work/tiers" <<'PY'
import sys
from pathlib import Path

from oci_builder.model.spec import load_spec
from oci_builder.payload.tiers import realize_tiers

path, work = map(Path, sys.argv[1:])
for name, folder in realize_tiers(load_spec(path), path.absolute().parent, work.absolute()).items():
    print(f"--tier={name}={folder}")
PY
)
mapfile -t options <<<"$tiers"
exec "$python" -m bench.run "${options[@]}" --work "$work" --json "$work/bench.json" "$@"
