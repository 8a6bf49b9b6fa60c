#!/bin/sh
# Runs tests/device/chroot_gpu.py on a machine with GPUs. Wheels that the machine lacks may lie in .whl/.
#   sh tests/device/run.sh host|image OUT
set -e
cd "$(dirname "$0")/../.."
if ls .whl/*.whl >/dev/null 2>&1; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
    PYTHONPATH=/tmp/site
    export PYTHONPATH
fi
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
exec python3 tests/device/chroot_gpu.py "$@"
