# shellcheck shell=bash
# Sourced by scripts that keep a Debian of another release in a folder. Needs root, mmdebstrap, and a Debian mirror: the
# one that this machine's own apt uses. Exit status 3 says that the machine cannot do it; the reason is on standard error.

# Seconds for one mmdebstrap: a mirror that hangs costs a skip, not the run.
MAKING=1500

unable() { echo "$(basename "$0" .sh): $*" >&2; exit 3; }

# The first source labelled Debian, as apt itself resolves its configuration.
mirror() {
  # shellcheck disable=SC2016
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' 2>/dev/null | head -n 1
}

# debian_root SUITE PACKAGES FOLDER [OPTION…]: a minimal system with these packages, made by mmdebstrap with the options.
debian_root() {
  local suite=$1 packages=$2 new=$3 uri options=() line apart=()
  shift 3
  [ "$(id -u)" = 0 ] || unable 'needs root'
  command -v mmdebstrap >/dev/null || unable 'mmdebstrap is not installed'
  uri=$(mirror)
  [ -n "$uri" ] || unable "this machine's apt has no Debian mirror (or apt-get update never ran)"
  while IFS= read -r line; do options+=(--aptopt="$line"); done < <(
    apt-config dump --format '%F "%v";%n' Acquire | grep -E '^Acquire::(http|https|Check-Valid-Until)[: ]' || true)
  rm -rf --one-file-system "$new"
  # What it mounts there is nobody else's business (tests compare the machine's mounts), and ends with it.
  if unshare --mount true 2>/dev/null; then apart=(unshare --mount); fi
  timeout --kill-after=30 "$MAKING" "${apart[@]}" \
    mmdebstrap --mode=root --variant=minbase --format=directory --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
    --include="$packages" "${options[@]}" \
    --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' --aptopt='Acquire::Retries "5"' \
    --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    "$@" --quiet "$suite" "$new" "$uri" >"$new.log" 2>&1 </dev/null ||
    { tail -n 5 "$new.log" >&2; rm -rf --one-file-system "$new"; unable "mmdebstrap failed"; }
}

# kept ROOT RECIPE FILL…: ROOT as `FILL… FOLDER` makes it, unless it is there with this very recipe; one maker at a time.
kept() {
  local root=$1 recipe=$2
  shift 2
  mkdir -p "$(dirname "$root")"
  exec 9>"$root.lock"
  flock 9
  [ "$(cat "$root/.recipe" 2>/dev/null)" != "$recipe" ] || return 0
  "$@" "$root.part"
  echo "$recipe" >"$root.part/.recipe"
  rm -rf --one-file-system "$root"
  mv "$root.part" "$root"
}
