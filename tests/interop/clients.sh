#!/bin/bash
# Current container clients from Debian unstable in a folder of their own, for the tests beside this file.
#
#   clients.sh make ROOT            build ROOT unless it is there and complete (about 1 GB)
#   clients.sh run ROOT CMD [ARG…]  replace this process by CMD inside ROOT
#
# Needs root, mmdebstrap, and a Debian mirror: the one that this machine's own apt uses. Exit status 3 says that the
# machine cannot do it; the reason is on standard error.
set -euo pipefail

PACKAGES=apptainer,buildah,ca-certificates,containerd,crane,crun,docker-cli,docker.io,podman,runc,skopeo,umoci
RECIPE="2 $PACKAGES" # another number or list: made anew

unable() { echo "clients: $*" >&2; exit 3; }

# The first source labelled Debian, as apt itself resolves its configuration.
mirror() {
  # shellcheck disable=SC2016
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' 2>/dev/null | head -n 1
}

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

make() {
  local root=$1 new=$1.part uri options=() line
  [ "$(id -u)" = 0 ] || unable 'needs root'
  command -v mmdebstrap >/dev/null || unable 'mmdebstrap is not installed'
  uri=$(mirror)
  [ -n "$uri" ] || unable "this machine's apt has no Debian mirror (or apt-get update never ran)"
  while IFS= read -r line; do options+=(--aptopt="$line"); done < <(
    apt-config dump --format '%F "%v";%n' Acquire | grep -E '^Acquire::(http|https|Check-Valid-Until)[: ]' || true)
  rm -rf --one-file-system "$new"
  mmdebstrap --mode=root --variant=minbase --format=directory --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
    --include="$PACKAGES" "${options[@]}" \
    --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' --aptopt='Acquire::Retries "5"' \
    --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --quiet sid "$new" "$uri" >"$root.log" 2>&1 </dev/null ||
    { tail -n 5 "$root.log" >&2; rm -rf --one-file-system "$new"; unable "mmdebstrap failed"; }
  configure "$new"
  echo "$RECIPE" >"$new/.recipe"
  rm -rf --one-file-system "$root"
  mv "$new" "$root"
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
  make)
    mkdir -p "$(dirname "$root")"
    exec 9>"$root.lock"
    flock 9
    [ "$(cat "$root/.recipe" 2>/dev/null)" = "$RECIPE" ] || make "$root"
    ;;
  run) enter "$root" "$@" ;;
  *) echo "clients: no verb $verb" >&2; exit 2 ;;
esac
