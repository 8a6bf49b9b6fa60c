#!/usr/bin/env bash
# Load an image archive into this host's container engine, and prove that the image is there.
#
#   load_image.sh ARCHIVE [ENGINE]
#
# ARCHIVE is runtime.docker.tar.gz (or runtime.oci.tar) with its container.json beside it. ENGINE is docker, podman or
# nerdctl; without it the first of these that is installed. Some engines refuse a compressed archive, and some end with 0
# and load nothing: success is that the image is there with an ID that container.json foretold. Needs Bash and Python 3.
#
# Exit status: 0 loaded · 2 wrong arguments or host · 3 another image has the name · 5 the engine could not load it

if [ -z "${BASH_VERSION:-}" ]; then
  echo 'load_image: this is a script for Bash: bash load_image.sh ...' >&2
  exit 2
fi
set -uo pipefail

die() { # status message
  printf 'load_image: %s\n' "$2" >&2
  exit "$1"
}

if [ "$#" -lt 1 ] || [ "$#" -gt 2 ]; then die 2 'usage: load_image.sh ARCHIVE [ENGINE]'; fi
archive=$1 engine=${2:-}
[ -f "$archive" ] || die 2 "there is no file $archive"
record=$(dirname -- "$archive")/container.json
[ -f "$record" ] || die 2 "$record is not there: it says what the image is called"
if [ -z "$engine" ]; then
  for engine in docker podman nerdctl ''; do
    [ -z "$engine" ] || ! command -v -- "$engine" >/dev/null || break
  done
fi
[ -n "$engine" ] || die 2 'neither docker, podman nor nerdctl is installed'
command -v -- "$engine" >/dev/null || die 2 "there is no $engine"

# The image's name, then every ID that it can get.
facts=$(python3 -I -c '
import json, sys
told = json.load(open(sys.argv[1]))
print(told["name"] + ":" + told["tag"])
ids = told["image_ids"]
print("\n".join(sorted({ids["classic"], *ids["containerd"].values()})))' "$record") || die 2 "$record is no record of a build"
{ read -r name; mapfile -t ids; } <<<"$facts"

# Sets found: what the engine has under the name.
look() {
  found=$("$engine" image inspect --format '{{.Id}}' "$name" 2>/dev/null) || found=''
  local id
  for id in "${ids[@]}"; do
    [ "${found#sha256:}" != "${id#sha256:}" ] || return 0
  done
  return 1
}

"$engine" load -i "$archive" >&2
if ! look; then
  printf 'load_image: %s did not load the file as it is; once more, decompressed\n' "$engine" >&2
  case $archive in
    *.gz) gzip -dc -- "$archive" | "$engine" load >&2 ;;
    *) "$engine" load <"$archive" >&2 ;;
  esac
  if ! look; then
    [ -z "$found" ] || die 3 "$engine has another image called $name ($found); foretold: ${ids[*]}"
    die 5 "$engine loaded no image called $name"
  fi
fi
printf '%s %s\n' "$name" "$found"
