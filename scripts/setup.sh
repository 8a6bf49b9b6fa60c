#!/bin/bash
# Prepare this checkout for work and tests: system packages (as root, where apt can), and .venv from the lock.
# Does nothing when nothing has changed. Starts no service.
#   OCI_BUILDER_NO_APT=1   leave the system alone; tests that need a missing program say so and are skipped
#   VENV=DIR               another place than .venv
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
required=(make git xz-utils ca-certificates)
clients=(docker.io skopeo umoci podman buildah netavark docker-registry)
tools=(mmdebstrap pigz attr acl libcap2-bin uidmap zstd openssl curl file zsh shellcheck tmux chromium gcc libc6-dev
       qemu-user)

say() { printf 'setup: %s\n' "$*" >&2; }

missing() {
  local p
  for p in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || printf '%s\n' "$p"
  done
}

install() {  # all at once, else one by one: a package that a distribution lacks must not cost the others
  local apt=(apt-get -qq -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=5 install --no-install-recommends) p
  "${apt[@]}" "$@" >/dev/null && return
  for p in "$@"; do "${apt[@]}" "$p" >/dev/null || say "$p could not be installed"; done
}

system_packages() {
  [ "$(id -u)" = 0 ] && [ -z "${OCI_BUILDER_NO_APT:-}" ] && command -v apt-get >/dev/null || return 0
  local wanted policy=/usr/sbin/policy-rc.d
  mapfile -t wanted < <(missing "${required[@]}" "${python_packages[@]}" "${clients[@]}" "${tools[@]}")
  # What could not be had a day ago is not asked for again with every make.
  local asked="$venv.apt"
  [ ${#wanted[@]} -gt 0 ] || return 0
  if [ "$(cat "$asked" 2>/dev/null)" = "${wanted[*]}" ] && [ -n "$(find "$asked" -mtime -1)" ]; then return 0; fi
  say "installing ${wanted[*]}"
  export DEBIAN_FRONTEND=noninteractive
  if [ ! -e "$policy" ]; then  # packages of daemons would start them
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
    # shellcheck disable=SC2064
    trap "rm -f $policy" EXIT
  fi
  apt-get -qq -o Acquire::Retries=5 update >/dev/null || say 'apt-get update failed'
  install "${wanted[@]}"
  missing "${wanted[@]}" | tr '\n' ' ' | sed 's/ $//' >"$asked"
}

good_python() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local p
  for p in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if command -v "$p" >/dev/null && good_python "$p"; then command -v "$p"; return; fi
  done
  return 1
}

python_packages=(python3-venv)
# Ubuntu 22.04: python3 is 3.10, and 3.11 is a package beside it.
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  python_packages=(python3.11 python3.11-venv)
fi
system_packages

python=$(find_python) || { say 'needs Python 3.11 or later with venv (Debian: apt install python3-venv)'; exit 2; }
stamp=$("$python" -c 'import sys; print(sys.version)'; cat requirements-dev.txt pyproject.toml)
if [ "$(cat "$venv/.stamp" 2>/dev/null)" != "$stamp" ]; then
  say "making $venv"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  pip=("$venv/bin/python" -m pip -qq --disable-pip-version-check --retries 10)
  "${pip[@]}" install -r requirements-dev.txt
  # The lock holds everything: nothing is resolved a second time, not even the build backend.
  "${pip[@]}" install --no-deps --no-build-isolation --editable .
  printf '%s\n' "$stamp" >"$venv/.stamp"
fi
