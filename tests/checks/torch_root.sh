#!/bin/bash
# Debian 13 with its CPU build of torch, and transformers, pytest and Ray from the Python index, for the controls of the
# GPU checks: PyPI's torch is CUDA's and would not fit into CI.
#
#   torch_root.sh ROOT PYTHON   make ROOT unless it is there and complete; PYTHON has the pip that fetches
#
# What it needs, and its exit status 3: see tests/lab/debian_root.sh.
set -euo pipefail

here=$(dirname "$(realpath -- "$0")")
# shellcheck source-path=SCRIPTDIR source=../lab/debian_root.sh
. "$here/../lab/debian_root.sh"

# The reference BLAS that torch would be content with takes forty times as long.
PACKAGES=libopenblas0-pthread,python3,python3-torch
# What no control needs: 300 MB of 1.2 GB. UCX loads AMD's runtime, and the LLVM in it, only where it is.
EXCLUDED=('/usr/share/locale/*' '/usr/share/mime/*' '/usr/lib/libtorch-test/*' '/usr/lib/python3/dist-packages/torch/include/*'
          '/usr/lib/python3/dist-packages/sympy/*/tests/*' '/usr/lib/x86_64-linux-gnu/libLLVM*'
          '/usr/lib/x86_64-linux-gnu/libamd_comgr*' '/usr/lib/x86_64-linux-gnu/libamdhip64*'
          # Bytecode of 300 MB of sources, of which a tenth is imported.
          /usr/bin/py3compile)

fill() {
  local new=$1 place options=()
  for place in "${EXCLUDED[@]}"; do options+=(--dpkgopt="path-exclude=$place"); done
  debian_root trixie "$PACKAGES" "$new" "${options[@]}"
  "$python" -m pip --quiet --disable-pip-version-check --retries 10 install --target "$new/opt/site" --no-deps --no-compile \
    --python-version 3.13 --implementation cp --only-binary=:all: --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -r "$here/requirements-torch.txt" >"$new.log" 2>&1 ||
    { tail -n 5 "$new.log" >&2; rm -rf --one-file-system "$new"; unable 'the Python index gave no wheels'; }
  # Once, here: a sandbox forgets what an import writes.
  PYTHONPATH=/opt/site chroot "$new" /usr/bin/python3 -c '
import _pytest.python, pytest, torch.distributed.fsdp, torch.testing, transformers.models.llama.modeling_llama' >"$new.log" 2>&1 ||
    { tail -n 5 "$new.log" >&2; rm -rf --one-file-system "$new"; unable 'torch does not start here'; }
}

root=$(realpath -m -- "$1") python=$2
recipe=$(cat "$0" "$here/requirements-torch.txt" "$here/../lab/debian_root.sh" | sha256sum)
kept "$root" "$recipe" fill
