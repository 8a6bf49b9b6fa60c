#!/bin/sh
# Runs the device scripts on a machine with GPUs. Wheels that the machine lacks may lie in .whl/.
#   sh tests/device/run.sh host|image|threads|tiers OUT
set -e
cd "$(dirname "$0")/../.."
if ls .whl/*.whl >/dev/null 2>&1; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
    PYTHONPATH=/tmp/site
    export PYTHONPATH
fi
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
case $1 in
host) exec python3 tests/device/chroot_gpu.py "$@" ;;
tiers) exec python3 tests/device/tiers_gpu.py "$@" ;;
*) exec python3 tests/device/image_gpu.py "$@" ;;
esac
