#!/bin/bash
# Build examples/quickstart into dist/quickstart, verify it, run its checks in a chroot, and say how to load it.
# Sets itself up: Python 3.11 or later with venv (by apt, as root, where it is missing) and a small environment.
#   VENV=DIR   use another environment than .venv      OUT=DIR   another place than dist/quickstart
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
out=${OUT:-dist/quickstart}

say() { printf 'demo: %s\n' "$*" >&2; }

busy() { # say what is being done, and every ten seconds that it goes on; then do it
  say "$1"
  shift
  (
    while sleep 10 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
      say "  still at it, $SECONDS s since the start"
    done
  ) &
  local beat=$! status=0
  "$@" || status=$?
  kill "$beat" 2>/dev/null || true
  wait "$beat" 2>/dev/null || true
  return "$status"
}

find_python() {
  local p
  for p in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$p"
      return
    fi
  done
  return 1
}

install_python() {  # Ubuntu 22.04: python3 is 3.10, and 3.11 is a package beside it
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
  local wanted=(python3-venv)
  if command -v python3 >/dev/null && ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    wanted=(python3.11 python3.11-venv)
  fi
  export DEBIAN_FRONTEND=noninteractive
  busy 'fetching the lists of packages' apt-get -qq -o Acquire::Retries=5 update >/dev/null
  busy "installing ${wanted[*]} ca-certificates" \
    apt-get -qq -y -o Acquire::Retries=5 install --no-install-recommends "${wanted[@]}" ca-certificates >/dev/null
}

if [ ! -x "$venv/bin/oci-builder" ] || [ ! -x "$venv/bin/uv" ]; then
  python=$(find_python) || { install_python; python=$(find_python); } ||
    { say 'needs Python 3.11 or later with venv (Debian: apt install python3-venv)'; exit 2; }
  busy "making the environment $venv" "$python" -m venv "$venv"
  busy 'installing oci-builder and uv there, with what they need' \
    "$venv/bin/python" -m pip -qq --disable-pip-version-check --retries 10 install \
    --constraint requirements-dev.txt --editable '.[docker,payload]'
fi

run() {  # say what comes, show the command as one would type it, then run it
  local what=$1 word
  shift
  printf '\n$ %s' "$venv/bin/oci-builder"
  for word; do  # quoted where a shell would take it apart
    case $word in '' | *[!A-Za-z0-9_./:=-]*) printf ' %s' "${word@Q}" ;; *) printf ' %s' "$word" ;; esac
  done
  echo
  if [ -t 2 ]; then say "$what" && "$venv/bin/oci-builder" "$@"; else busy "$what" "$venv/bin/oci-builder" "$@"; fi
}

cache=(--cache "$out/.cache")
run 'building: Python and two tiers (installed by uv), a base of this machine, three archives' \
  build examples/quickstart/spec.json --out "$out" "${cache[@]}"
run 'verifying both image archives, every byte' \
  verify "$out/runtime.oci.tar" "$out/runtime.docker.tar.gz" --profile strict
run 'looking into it' inspect "$out/runtime.oci.tar"
run 'unpacking it, running its checks in a sandbox' verify "$out/runtime.oci.tar" --exec "${cache[@]}"
run 'running a program in it' exec "${cache[@]}" "$out/runtime.oci.tar" /opt/quickstart/envs/base/bin/python -c \
  'import sys, numpy; print("numpy", numpy.__version__, "in", sys.prefix)'

printf '\nMade in %s:\n' "$out"
find "$out" -maxdepth 1 -type f -printf '  %10s  %f\n' | sort -k 2
cat <<TEXT

Load it:
  docker load -i $out/runtime.docker.tar.gz && docker run --rm -it quickstart:r1
  podman load -i $out/runtime.docker.tar.gz
  skopeo copy oci-archive:$out/runtime.oci.tar containers-storage:quickstart:r1
  apptainer exec oci-archive:$out/runtime.oci.tar /opt/quickstart/envs/vllm/bin/python -V
  $venv/bin/oci-builder exec $out/runtime.oci.tar -- /bin/sh
TEXT
