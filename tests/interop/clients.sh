#!/bin/bash
# Current container clients from Debian unstable in a folder of their own, for the tests beside this file.
#
#   clients.sh make ROOT            build ROOT unless it is there and complete (about 1 GB)
#   clients.sh run ROOT CMD [ARG…]  replace this process by CMD inside ROOT
#
# What it needs, and its exit status 3: see tests/lab/debian_root.sh.
set -euo pipefail

PACKAGES=apptainer,buildah,ca-certificates,containerd,crane,crun,docker-cli,docker.io,podman,runc,skopeo,umoci
RECIPE="2 $PACKAGES" # another number or list: made anew

# shellcheck source-path=SCRIPTDIR source=../lab/debian_root.sh
. "$(dirname "$(realpath -- "$0")")/../lab/debian_root.sh"

configure() { # inside the new root
  # Ordinary sandboxes hold back some capabilities; asking for all of them fails there.
  sed -i 's/^root default capabilities = .*/root default capabilities = no/' "$1/etc/apptainer/apptainer.conf"
  mkdir -p "$1/etc/containers"
  cat >"$1/etc/containers/containers.conf" <<'CONF'
[containers]
default_ulimits = []
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
CONF
  echo '{"default": [{"type": "insecureAcceptAnything"}]}' >"$1/etc/containers/policy.json"
}

fill() {
  debian_root sid "$PACKAGES" "$1"
  configure "$1"
}

# A private mount namespace with ROOT as its real root: runc and apptainer pivot, which a plain chroot forbids.
# /tmp, the temporary folder and each of $CLIENTS_BIND (colons between) are the machine's own, at the same paths.
enter() {
  export CLIENTS_ROOT=$1 CLIENTS_TMP="${TMPDIR:-/tmp}"
  shift
  # shellcheck disable=SC2016
  exec unshare --mount --propagation private -- bash -euc '
    mount --bind "$CLIENTS_ROOT" "$CLIENTS_ROOT"
    for place in /proc /sys /dev; do mount --rbind "$place" "$CLIENTS_ROOT$place"; done
    mount -t tmpfs -o mode=755 tmpfs "$CLIENTS_ROOT/run"
    mkdir -p "$CLIENTS_ROOT/run/lock"
    IFS=: read -ra binds <<<"/tmp:$CLIENTS_TMP:${CLIENTS_BIND:-}"
    for place in "${binds[@]}"; do
      [ -d "$place" ] || continue
      mkdir -p "$CLIENTS_ROOT$place" && mount --rbind "$place" "$CLIENTS_ROOT$place"
    done
    cd "$CLIENTS_ROOT" && mkdir -p mnt/old && pivot_root . mnt/old && cd / && umount --lazy mnt/old
    exec env -i HOME=/root USER=root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin TMPDIR="$CLIENTS_TMP" \
      PODMAN_IGNORE_CGROUPSV1_WARNING=1 ${APPTAINER_TMPDIR:+"APPTAINER_TMPDIR=$APPTAINER_TMPDIR"} "$@"' enter "$@"
}

[ $# -ge 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
verb=$1 root=$(realpath -m -- "$2")
shift 2
case $verb in
  make) kept "$root" "$RECIPE" fill ;;
  run) enter "$root" "$@" ;;
  *) echo "clients: no verb $verb" >&2; exit 2 ;;
esac
