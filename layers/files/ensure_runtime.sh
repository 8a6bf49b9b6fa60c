#!/usr/bin/env bash
# Install the portable runtime archive on this host, or check the installation that is there.
#
#   ensure_runtime.sh <URL or file> <sha256> [prefix]
#
# Needs Bash 4, Python 3.10 or later, and for a URL curl; nothing is installed, no root is needed. The prefix defaults to
# NRL_RUNTIME_PREFIX, then to ~/.local/share/nemo-rl-v070-b200. Everything happens beside the prefix and appears there by
# one rename; any number of these may run at once. On success nothing but the prefix is left.
#
#   PROXY               for a URL: the proxy that alone is used (http://host:port); only Hugging Face is asked
#   HF_TOKEN            optional; sent to huggingface.co only, never to where it redirects
#   NRL_RECHECK=quick   check an installation by sizes and modes only, do not read its files
#   NRL_LOCK_TIMEOUT    seconds to wait for another installation (3600)
#   NRL_RETRIES         attempts of a download (8)
#   NRL_JOBS            threads (all cores)
#
# Exit status: 0 installed or intact · 2 wrong arguments, variables or host · 3 wrong bytes (archive or installation) ·
# 4 refused address or archive entry · 5 network or disk · 6 something else is at the prefix · 129, 130, 143 stopped by
# a signal. What a failed or stopped start unpacked is kept beside the prefix as .NAME.failed; the next start removes it.

# Another shell reads up to here. Of Bash, what a caller exported in SHELLOPTS or BASHOPTS is not wanted.
if [ -z "${BASH_VERSION:-}" ]; then
  echo 'ensure_runtime: error [install.usage]: this is a script for Bash: bash ensure_runtime.sh ...' >&2
  exit 2
fi
set +efCn +o posix -uo pipefail
shopt -u failglob nullglob nocasematch
export -n SHELLOPTS BASHOPTS
umask 022
unset CDPATH

PYTHON=${NRL_PYTHON:-python3}
RETRIES=${NRL_RETRIES:-8}

say() { printf 'ensure_runtime: %s\n' "$*" >&2; }
die() { # status code message
  printf 'ensure_runtime: error [%s]: %s\n' "$2" "$3" >&2
  exit "$1"
}

# Names are bytes, whatever the locale says.
helper() { "$PYTHON" -X utf8 -I -B -c "$HELPER" "$@"; }

# For what takes long: Bash acts on a signal while it waits for a child in the background only.
CHILD='' LOADING=''
waited() {
  local status
  CHILD=starting
  "$PYTHON" -X utf8 -I -B -c "$HELPER" "$@" & # no function: the child must be Python itself
  CHILD=$!
  wait "$CHILD"
  status=$?
  CHILD=''
  return "$status"
}

stopped() { # status signal
  trap '' INT TERM HUP
  if [ -z "$CHILD" ]; then
    say "stopped by SIG$2; a download that was begun is continued next time"
  else
    # The helper says what it leaves. It may have had the signal too.
    [ "$CHILD" != starting ] || CHILD=${!:-}
    kill -TERM "$CHILD" 2>/dev/null
    wait "$CHILD"
    [ -z "$LOADING" ] || say "stopped by SIG$2; the download is continued next time"
  fi
  exit "$1"
}

numbers() {
  local name pattern value
  while read -r name pattern; do
    value=${!name:-}
    [[ -z $value || $value =~ ^$pattern$ ]] || die 2 install.usage "$name=$value is no number that can be used here; unset it"
  done <<'END'
NRL_JOBS [1-9][0-9]{0,3}
NRL_RETRIES [1-9][0-9]{0,5}
NRL_LOCK_TIMEOUT [0-9]{1,9}(\.[0-9]{1,9})?
NRL_RETRY_SECONDS (0|[1-9][0-9]{0,5})
NRL_STALL_SECONDS [1-9][0-9]{0,5}
END
  case ${NRL_RECHECK:-} in
    '' | quick | full) ;;
    *) die 2 install.usage "NRL_RECHECK=$NRL_RECHECK is neither quick nor full" ;;
  esac
}

main() {
  if [ "$#" -lt 2 ] || [ "$#" -gt 3 ]; then
    die 2 install.usage 'usage: ensure_runtime.sh <URL or file> <sha256> [prefix]'
  fi
  local source=$1 sha=${2#sha256:} prefix=${3-}
  # A caller's unset variable is no wish for the default.
  [ "$#" -lt 3 ] || [ -n "$prefix" ] || die 2 install.usage 'the prefix is empty; leave it out for the default'
  [ -n "$prefix" ] || prefix=${NRL_RUNTIME_PREFIX:-}
  if [ -z "$prefix" ]; then
    [ -n "${HOME:-}" ] || die 2 install.usage 'HOME is not set: name the prefix, or set NRL_RUNTIME_PREFIX'
    prefix=$HOME/.local/share/nemo-rl-v070-b200
  fi
  [[ $sha =~ ^[0-9a-fA-F]{64}$ ]] || die 2 install.usage "not a SHA-256 (64 hex digits): $sha"
  sha=${sha,,}
  numbers
  need "$PYTHON" tar gzip sha256sum
  prefix=$(helper begin "$prefix") || failed_python $?
  local parent=${prefix%/*} name=${prefix##*/}
  helper folder "$parent" || exit
  BESIDE="$parent/.$name"
  trap 'stopped 130 INT' INT
  trap 'stopped 143 TERM' TERM
  trap 'stopped 129 HUP' HUP
  lock "$prefix" "$sha" || exit
  if [ "$STATE" = same ]; then
    waited recheck "$prefix" || exit
    say "$prefix is intact"
    printf '%s\n' "$prefix"
    return 0
  fi
  local archive=$source part=''
  case $source in
    *://*) part_name "$sha"; part=$PART; download "$source" "$sha" "$part"; archive=$part ;;
    *) [ -f "$source" ] || die 2 install.source "there is no file $source" ;;
  esac
  waited install "$archive" "$sha" "$prefix" ${part:+checked} || exit
  [ -z "$part" ] || rm -f -- "$part"
  say "installed in $prefix"
  printf '%s\n' "$prefix"
  return 0
}

need() {
  local program absent=''
  for program in "$@"; do
    command -v -- "$program" >/dev/null || absent="$absent, $program"
  done
  [ -z "$absent" ] || die 2 install.host "this host has no ${absent#, }"
}

failed_python() { # status
  "$PYTHON" -I -c 'import sys; sys.exit(75 * (sys.version_info < (3, 10)))'
  case $? in
    0) exit "$1" ;;
    75) die 2 install.host "$PYTHON is older than 3.10" ;;
    *) die 2 install.host "$PYTHON does not start: set NRL_PYTHON to a Python 3.10 or later" ;;
  esac
}

# Without locks others may be downloading too: a file for each start, and what a dead one of this host left goes on.
part_name() { # sha; sets PART
  local old host
  PART="$BESIDE.download-${1:0:16}"
  [ -n "$UNLOCKED" ] || return 0
  # HOSTNAME may be the login node's: schedulers take it along.
  read -r host </proc/sys/kernel/hostname || host=${HOSTNAME:-host}
  PART=$PART-$host-
  for old in "$PART"[1-9]*; do
    if [ -f "$old" ] && ! kill -0 "${old##*-}" 2>/dev/null && mv -- "$old" "$PART$$" 2>/dev/null; then break; fi
  done
  PART=$PART$$
}

# A lock file that is removed afterwards: whoever gets the lock on a removed file takes the new one. Who may not write
# beside the prefix can still re-check what is there.
lock() { # prefix sha; sets STATE and UNLOCKED
  local status
  UNLOCKED=''
  while :; do
    # Another user's lock is waited for as well.
    if ! { exec 9>>"$BESIDE.lock"; } 2>/dev/null && ! { exec 9<"$BESIDE.lock"; } 2>/dev/null; then
      helper state "$1" "$2"
      status=$?
      [ "$status" != 0 ] || die 5 io.readonly "cannot write beside $1"
      STATE=same
      [ "$status" != 76 ] || status=0
      return "$status"
    fi
    waited lock "$BESIDE.lock" "$1" "$2"
    status=$?
    [ "$status" != 75 ] || continue
    # 5: somebody else holds it.
    [ "$status" = 5 ] || trap 'rm -f -- "$BESIDE.lock" 2>/dev/null' EXIT
    STATE=absent
    [ "$status" != 76 ] || { STATE=same; status=0; }
    [ "$status" != 77 ] || { UNLOCKED=yes; status=0; }
    return "$status"
  done
}

# The hub, and where it keeps what it redirects to.
allowed() {
  local host=${1#https://}
  [ "$host" != "$1" ] || return 1
  host=${host%%[/?#]*}
  case $host in
    *@* | *:*) return 1 ;;
    huggingface.co | *.huggingface.co | *.hf.co) return 0 ;;
  esac
  return 1
}

download() { # url sha part
  local url=$1 sha=$2 part=$3 attempt status
  need curl
  if ! allowed "$url" || [[ $url != https://huggingface.co/* ]]; then
    die 4 install.host_refused "only https://huggingface.co/ is downloaded from, not ${url%%\?*}"
  fi
  [ -n "${PROXY:-}" ] || die 2 install.proxy 'set PROXY: a download goes through an explicit proxy only'
  for ((attempt = 1; attempt <= RETRIES; attempt++)); do
    # Every attempt begins at the hub: a signed link may have expired.
    if resolve "$url" && room "$part" && fetch "$part"; then
      waited digest "$part" "$sha"
      status=$?
      [ "$status" -ne 0 ] || return 0
      [ "$status" -eq 3 ] && [ "$FRESH" = no ] || exit "$status"
      # It was continued: the beginning may be another file's. Once more from nothing.
      rm -f -- "$part"
      continue
    fi
    [ "$FATAL" = 0 ] || exit "$FATAL"
    say "download attempt $attempt of $RETRIES failed"
    sleep "$((attempt < 10 ? attempt * ${NRL_RETRY_SECONDS:-2} : 20))" 9>&- &
    CHILD=$! LOADING=yes
    wait "$CHILD"
    CHILD='' LOADING=''
  done
  die 5 http.download "no download after $RETRIES attempts; what came is kept in $part and continued next time"
}

room() { # part; no later attempt has more
  helper space "$1" "$LENGTH" || { FATAL=$?; return 1; }
}

# curl with nothing from the user's files or environment; secrets come on standard input, not in the arguments.
ask() { # url arguments…; sets ANSWER
  local url=$1 out status
  shift
  ANSWER='' LOADING=yes CHILD=starting
  # A pipe of this shell's own: what curl says is small. A substitution's status is not known to every Bash.
  exec {out}<> <(:)
  curl -q --silent --show-error --noproxy '' --proto '=https' --connect-timeout 30 --globoff -K - "$@" \
    < <(settings "$url") >&"$out" 9>&- &
  CHILD=$!
  wait "$CHILD"
  status=$?
  CHILD='' LOADING=''
  printf '\0' >&"$out"
  IFS= read -r -d '' ANSWER <&"$out"
  exec {out}<&-
  return "$status"
}

settings() { # url; for curl
  local quote='"'
  printf 'proxy = "%s"\n' "${PROXY//$quote/}"
  if [ -n "${HF_TOKEN:-}" ] && [[ $1 == https://huggingface.co/* ]]; then
    printf 'header = "Authorization: Bearer %s"\n' "${HF_TOKEN//$quote/}"
  fi
  printf 'url = "%s"\n' "${1//$quote/%22}"
}

# Follow the hub's redirects one by one, each checked; sets TARGET and LENGTH (0: unknown). FATAL ends the attempts.
# Where it keeps its files is not asked with HEAD: a signed link may be good for GET only.
resolve() {
  local url=$1 hop code next
  FATAL=0 LENGTH=0
  for ((hop = 0; hop < 6; hop++)); do
    TARGET=$url
    [[ $url == https://huggingface.co/* ]] || return 0
    ask "$url" --head --suppress-connect-headers --max-time 120 --write-out '%{http_code} %{redirect_url}' || return 1
    read -r code next <<<"${ANSWER##*$'\n'}"
    case $code in
      200) LENGTH=$(header content-length "$ANSWER"); return 0 ;;
      30[12378]) LENGTH=$(header x-linked-size "$ANSWER") ;;
      401 | 403 | 404 | 410) FATAL=5; say "error [http.status]: $code for ${url%%\?*}"; return 1 ;;
      *) say "status $code for ${url%%\?*}"; return 1 ;;
    esac
    redirected "$next" || return 1
    url=$next
  done
  FATAL=4
  say 'error [install.host_refused]: too many redirects'
  return 1
}

redirected() {
  allowed "$1" && return 0
  FATAL=4
  say "error [install.host_refused]: redirected to ${1%%\?*}, which is not Hugging Face"
  return 1
}

header() { # name answer; a number, 0 when there is none
  local line name value=0
  while IFS= read -r line; do
    name=${line%%:*}
    if [ "${name,,}" = "$1" ]; then value=${line#*:}; value=${value//[$' \t\r']/}; fi
  done <<<"$2"
  [[ $value =~ ^[0-9]{1,15}$ ]] || value=0
  printf '%s' "$value"
}

fetch() { # part; FRESH says whether all of it came in one go
  local part=$1 have=0 status hop code next
  [ ! -f "$part" ] || have=$(helper size "$part")
  FRESH=yes
  if [ "$LENGTH" -gt 0 ] && [ "$have" -gt "$LENGTH" ]; then rm -f -- "$part"; have=0; fi
  if [ "$have" -gt 0 ]; then
    FRESH=no
    [ "$have" -ne "$LENGTH" ] || return 0
    say "continuing at $have bytes"
  fi
  for ((hop = 0; hop < 6; hop++)); do
    # --location with no redirect allowed: the body of a redirect must not get into the file.
    ask "$TARGET" --fail --location --max-redirs 0 --speed-limit 1000 --speed-time "${NRL_STALL_SECONDS:-60}" \
      --continue-at "$have" --output "$part" --write-out '%{http_code} %{redirect_url}'
    status=$?
    read -r code next <<<"$ANSWER"
    case $status in
      0) [ "$LENGTH" -eq 0 ] || [ "$(helper size "$part")" -eq "$LENGTH" ]; return ;;
      47) redirected "$next" || return 1; TARGET=$next ;;
      23) FATAL=5; say "error [io.space]: cannot write $part"; return 1 ;;
      33 | 36) say 'the server cannot continue; starting again'; rm -f -- "$part"; return 1 ;;
      *) [ "$code" != 416 ] || rm -f -- "$part"; return 1 ;;
    esac
  done
  return 1
}

# shellcheck disable=SC2016
read -r -d '' HELPER <<'PYTHON'
import concurrent.futures, contextlib, errno, fcntl, gzip, hashlib, json, os, platform, re, shutil, signal, stat
import subprocess, sys, tempfile, time, zlib

RECORD, FILES = "installed.json", "files.json.gz"
OWN, FAILED = ".nrl-install", ".nrl-failed"
JOBS = max(1, int(os.environ.get("NRL_JOBS") or len(os.sched_getaffinity(0))))
# Written at run time inside the prefix: what upstream patches in vLLM, with a lock beside it, and in others.
VOLATILE = re.compile(
    r"\.patch_lock$|/vllm/v1/executor/ray_executor\.py$"
    r"|/vllm/model_executor/models/llama_eagle3\.py$|/vllm/.*hermes_tool_parser\.py$"
    r"|/transformer_engine/pytorch/triton/permutation\.py$|/ray/_private/runtime_env/nsight\.py$")
# Folder, module, interpreter: __pycache__/<module>.<interpreter>[.opt-<level>].pyc
BYTECODE = re.compile(r"(?s)((?:.*/)?)__pycache__/([^/]+?)\.([^/.]+)(?:\.opt-[^/.]+)?\.pyc$")
SAME, UNLOCKED = 76, 77


class Stop(Exception):
    def __init__(self, status, code, message):
        super().__init__(message)
        self.status, self.code = status, code


class Stopped(BaseException):
    pass


def stop_on_signals():
    seen = []

    def act(number, _frame):
        seen.append(number)
        if len(seen) == 1:
            raise Stopped(number)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, act)


def pooled(function, items):
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        try:
            return list(pool.map(function, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def say(text):
    print(f"ensure_runtime: {text}", file=sys.stderr, flush=True)


def show(name):
    return ascii(os.fsdecode(name))


# ---- arguments and host

def begin(text):
    host()
    place = "/" + os.path.abspath(text).lstrip("/")  # two slashes in front stay two for abspath
    if text != text.strip() or not re.fullmatch(r"/[A-Za-z0-9._/+@=-]+", place):
        raise Stop(2, "install.prefix", f"prefix {show(place)}: only letters, digits and ._/+@=- work (Ray starts "
                   "workers through a shell without quoting); choose another")
    if len(place) > 200 or place.count("/") < 2:
        raise Stop(2, "install.prefix", f"prefix {show(place)}: needs a folder below the root, 200 bytes at most")
    beside = f".{os.path.basename(place)}.download-{'0' * 16}-{os.uname().nodename}-{1 << 22}"
    if len(beside) > 255:
        raise Stop(2, "install.prefix", f"prefix {show(place)}: its last part is {len(beside) - 255} bytes too long: "
                   "files beside it could not be named")
    print(place)


def host():
    if sys.version_info < (3, 10):
        raise Stop(2, "install.host", f"{sys.executable} is Python {platform.python_version()}, older than 3.10")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Stop(2, "install.host", f"Linux x86_64 is needed, this is {sys.platform} {platform.machine()}")
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        libc = ""
    found = re.match(r"glibc (\d+)\.(\d+)", libc)
    if not found or (int(found[1]), int(found[2])) < (2, 35):
        raise Stop(2, "install.host", f"glibc 2.35 or later is needed (Ubuntu 22.04 has it), this host has {libc or 'another'}")


# ---- lock, state, space

def lock(path, place, sha):
    held = wait(path)
    if held == 75:
        return held
    answer = state(place, sha)
    if held is None:
        return answer or UNLOCKED
    sweep(place)
    return answer


def sweep(place):
    """What killed starts left: nobody unpacks here while the lock is ours, unless another host does not see it."""
    parent, name = os.path.split(place)
    start, here = f".{name}.staging-", os.uname().nodename
    for old in sorted(os.listdir(parent)):
        host, dash, number = old[len(start):].rpartition("-")
        if not old.startswith(start) or not dash or not number.isdigit():
            continue
        path = os.path.join(parent, old)
        if host == here:
            clear(path, "a killed start")
        else:
            say(f"{path} is what a start on {host} unpacks or, if it was killed, left: remove it when none runs there")


def wait(path):
    limit = time.monotonic() + float(os.environ.get("NRL_LOCK_TIMEOUT") or 3600)
    told = False
    while True:
        try:
            fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                say(f"this file system has no locks ({error.strerror}); the final rename decides")
                return None
        if not told:
            told = True
            say("waiting for another installation")
        if time.monotonic() > limit:
            raise Stop(5, "install.lock", f"another installation holds {show(path)} for too long")
        time.sleep(0.1)
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return 75
    mine = os.fstat(9)
    return 0 if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino) else 75


def record(place):
    try:
        with open(os.path.join(place, OWN, RECORD), "rb") as file:
            found = json.load(file)
        return found if isinstance(found, dict) else None
    except (OSError, ValueError):
        return None


def state(place, sha):
    if not os.path.lexists(place):
        return 0
    if os.path.islink(place) or not os.path.isdir(place):
        raise Stop(6, "install.differs", f"{place} is there and is not a folder; it was left alone")
    if not os.listdir(place):
        return 0
    found = record(place)
    if found is None:
        raise Stop(6, "install.differs", f"{place} holds something that this script did not install; it was left "
                   "alone. Choose another prefix, or move it away")
    if found.get("sha256") != sha:
        raise Stop(6, "install.differs", f"{place} holds another archive (sha256 {found.get('sha256')}); it was left "
                   "alone. Choose another prefix, or remove it")
    return SAME


def free_space(path, needed, what):
    folder = os.path.dirname(os.path.abspath(path))
    found = os.statvfs(folder)
    if found.f_flag & os.ST_NOEXEC:
        raise Stop(2, "install.host", f"{folder} is mounted noexec: no program starts from there; choose another prefix")
    free = found.f_bavail * found.f_frsize
    if free < needed:
        raise Stop(5, "io.space", f"{what} needs {needed} bytes in {folder}, {free} are free")
    if found.f_files and found.f_favail < 1000:
        raise Stop(5, "io.space", f"{folder} has {found.f_favail} inodes left")


def own(part):
    """Whether a file is what this user would make there: where all may write, somebody else can have put it."""
    found = os.lstat(part)
    with tempfile.TemporaryFile(dir=os.path.dirname(part)) as probe:  # a file system may give files owners and modes
        mine = os.fstat(probe.fileno())
    return (stat.S_ISREG(found.st_mode) and found.st_uid == mine.st_uid and found.st_nlink == 1
            and not found.st_mode & ~mine.st_mode & 0o022)


def space(part, length):
    if os.path.lexists(part) and not own(part):
        say(f"{part} is not this user's own file; it is not continued")
        try:
            os.unlink(part)
        except OSError:
            strange(part)
    have = os.path.getsize(part) if os.path.exists(part) else 0
    # What is unpacked later is larger than the archive; its real size is known once the archive is here.
    free_space(part, 2 * int(length) - have, "the download, unpacked,")


def digest(path, sha):
    value = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(4 << 20):
            value.update(block)
        found = identity(file)
    if value.hexdigest() != sha:
        raise Stop(3, "blob.digest", f"{path} has sha256 {value.hexdigest()}, expected {sha}; nothing was unpacked")
    return found


def strange(part):
    raise Stop(6, "install.differs", f"{part} is somebody else's file; choose another prefix, or have it removed")


def digest_part(part, sha):
    digest(part, sha) if own(part) else strange(part)


def identity(file):
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def unchanged(archive, before, after):
    if before != after:
        raise Stop(3, "archive.changed", f"{archive} was written to or replaced meanwhile")


# ---- gzip: members that say how long they are are unpacked by several threads, anything else by one

def member_length(head):
    """Length in the gzip extra field OB, a hint; 0 when there is none."""
    if len(head) < 20 or head[:4] != b"\x1f\x8b\x08\x04":
        return 0
    at, end = 12, 12 + int.from_bytes(head[10:12], "little")
    while at + 4 <= min(end, len(head)):
        size = int.from_bytes(head[at + 2:at + 4], "little")
        if head[at:at + 2] == b"OB" and size == 4:
            return int.from_bytes(head[at + 4:at + 8], "little")
        at += 4 + size
    return 0


def inflate(data):
    engine = zlib.decompressobj(31)
    out = engine.decompress(data)
    return out if engine.eof and not engine.unused_data else None


def parallel(file):
    """Uncompressed blocks in order. Stops in front of a member without a (true) length; then the file stands there."""
    size = os.fstat(file.fileno()).st_size
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        waiting, at, more = [], file.tell(), True
        while more or waiting:
            while more and len(waiting) < 3 * JOBS:
                head = os.pread(file.fileno(), 64, at)
                length = member_length(head)
                more = 0 < length <= min(64 << 20, size - at)
                if more:
                    waiting.append((at, pool.submit(lambda a, n: inflate(os.pread(file.fileno(), n, a)), at, length)))
                    at += length
            if not waiting:
                break
            start, work = waiting.pop(0)
            try:
                block = work.result()
            except zlib.error as error:
                raise Stop(3, "gzip.data", f"bad gzip data at byte {start}: {error}") from None
            if block is None:
                file.seek(start)
                return
            yield block
        file.seek(at)


def serial(file):
    engine = None
    while data := file.read(1 << 20):
        while data:
            engine = engine or zlib.decompressobj(31)
            try:
                out = engine.decompress(data, 4 << 20)
            except zlib.error as error:
                raise Stop(3, "gzip.data", f"bad gzip data: {error}") from None
            data = engine.unconsumed_tail or engine.unused_data
            if engine.eof:
                engine = None
            yield out
    if engine is not None:
        raise Stop(3, "gzip.truncated", "the archive ends in the middle of gzip data")


def blocks(file):
    yield from parallel(file)
    yield from serial(file)


def unpacked_size(file, size):
    """Bytes that the archive gives, exact when every member says its length; else a guess."""
    at = total = 0
    while at < size:
        length = member_length(os.pread(file.fileno(), 64, at))
        if not 0 < length <= size - at:
            return max(total, 3 * size)
        at += length
        total += int.from_bytes(os.pread(file.fileno(), 4, at - 4), "little")
    return total


# ---- tar: ustar, PAX and GNU long names; no devices, no sparse files

class Source:
    def __init__(self, chunks):
        self.chunks, self.left, self.at = iter(chunks), memoryview(b""), 0

    def some(self, limit):
        while not self.left:
            block = next(self.chunks, None)
            if block is None:
                raise Stop(3, "tar.truncated", f"the archive ends at byte {self.at} of the tar")
            self.left = memoryview(block)
        part, self.left = self.left[:limit], self.left[limit:]
        self.at += len(part)
        return part

    def exact(self, count):
        first = self.some(count)
        if len(first) == count:
            return bytes(first)
        out = bytearray(first)
        while len(out) < count:
            out += self.some(count - len(out))
        return bytes(out)

    def data(self, size):
        left = size
        while left:
            part = self.some(left)
            left -= len(part)
            yield part
        if size % 512:
            self.exact(512 - size % 512)

    def rest_is_zero(self):
        zero = bytes(1 << 16)
        for block in (self.left, *self.chunks):
            for at in range(0, len(block), len(zero)):
                part = block[at:at + len(zero)]
                if part != zero[:len(part)]:
                    raise Stop(3, "tar.trailing", "data follows the end of the archive")


def number(field, where):
    if field[0] & 0x80:
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if field[0] & 0x40:
            raise Stop(3, "tar.size", f"negative number in the header at byte {where}")
        return value
    text = field.strip(b" \0")
    if not re.fullmatch(rb"[0-7]*", text):
        raise Stop(3, "tar.header", f"not a number in the header at byte {where}")
    return int(text or b"0", 8)


def decimal(text, pattern, where):
    if not re.fullmatch(pattern, text):
        raise Stop(3, "tar.pax", f"not a number in the PAX record before byte {where}: {show(text[:40])}")
    return text


def pax(data, where):
    out, at = {}, 0
    while at < len(data):
        found = re.match(rb"([1-9][0-9]{0,9}) ([^=\0]+)=", data[at:at + 400])
        end = at + int(found[1]) if found else 0
        if not found or end > len(data) or data[end - 1:end] != b"\n" or end <= at + found.end():
            raise Stop(3, "tar.pax", f"bad PAX record before byte {where}")
        out[found[2]] = data[at + found.end():end - 1]
        at = end
    return out


def entries(source):
    """(name, type, size, mode, mtime, link) of each entry; the caller reads its data before it goes on."""
    extra = {}
    while True:
        where = source.at
        head = source.exact(512)
        if head == bytes(512):
            if source.exact(512) != bytes(512):
                raise Stop(3, "tar.trailing", "a lone zero block")
            source.rest_is_zero()
            return
        if sum(head) - sum(head[148:156]) + 256 != number(head[148:156], where):
            raise Stop(3, "tar.checksum", f"wrong checksum of the header at byte {where}")
        kind, size = head[156:157], number(head[124:136], where)
        if kind in (b"x", b"g", b"L", b"K"):
            if size > 1 << 20:
                raise Stop(3, "tar.header", f"an extended header of {size} bytes at byte {where}")
            data = b"".join(source.data(size))
            if kind == b"x":
                extra.update(pax(data, where))
            elif kind != b"g":
                extra[b"path" if kind == b"L" else b"linkpath"] = data.rstrip(b"\0")
            continue
        name = head[:100].split(b"\0")[0]
        if head[257:263] == b"ustar\0" and head[345]:
            name = head[345:500].split(b"\0")[0] + b"/" + name
        if any(key.startswith(b"GNU.sparse") for key in extra):
            raise Stop(4, "entry.sparse", f"{show(name)}: sparse entries are refused")
        name = extra.get(b"path", name)
        link = extra.get(b"linkpath", head[157:257].split(b"\0")[0])
        size = int(decimal(extra[b"size"], rb"[0-9]{1,18}", where)) if b"size" in extra else size
        when = (float(decimal(extra[b"mtime"], rb"-?[0-9]{1,12}(\.[0-9]*)?", where)) if b"mtime" in extra
                else number(head[136:148], where))
        if when >= 1 << 40:
            raise Stop(3, "entry.mtime", f"{show(name)}: a time beyond all bounds")
        extra = {}
        yield name, kind, size, number(head[100:108], where) & 0o777, when, link


# ---- unpacking

class Unpacker:
    def __init__(self, root):
        self.root, self.folders, self.links = os.fsencode(root), {b"": (0o755, 0)}, set()
        self.listed, self.files = {}, 0

    def clean(self, raw):
        parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
        if b".." in parts or b"\0" in raw:
            raise Stop(4, "path.escape", f"{show(raw)} leaves the archive")
        if len(raw) > 4096 or len(parts) > 128 or max(map(len, parts), default=0) > 255:
            raise Stop(4, "limit.name", f"{show(raw[:100])}…: over 4096 bytes, 128 folders, or 255 bytes in one name")
        return b"/".join(parts)

    def parent(self, name):
        above = name.rpartition(b"/")[0]
        if above not in self.folders:
            self.folder(above, 0o755, 0)
        return name

    def folder(self, name, mode, when):
        path, known = self.root, b""
        for part in name.split(b"/") if name else ():
            known = known + b"/" + part if known else part
            if known in self.links or known in self.listed:
                raise Stop(4, "path.symlink", f"{show(name)} leads through {show(known)}, which is not a folder")
            path = self.root + b"/" + known
            if known not in self.folders:
                os.mkdir(path, 0o755)
                self.folders[known] = (0o755, 0)
        self.folders[name] = (mode, when)

    def fresh(self, name):
        if name in self.listed or name in self.links or name in self.folders:
            raise Stop(3, "tar.duplicate", f"{show(name)} stands twice in the archive")
        return self.root + b"/" + self.parent(name)

    def add(self, source, name, kind, size, mode, when, link):
        name = self.clean(name)
        if kind == b"5":
            self.folder(name, mode, when)
        elif kind in (b"0", b"\0", b"7"):
            self.write(self.fresh(name), name, source.data(size), size, mode, when)
        elif kind == b"2":
            if not 0 < len(link) < 4096:
                raise Stop(3, "tar.link", f"{show(name)}: a link to {len(link)} bytes")
            os.symlink(link, self.fresh(name))
            self.links.add(name)
            self.listed[name] = ["l", os.fsdecode(link)]
        elif kind == b"1":
            target = self.clean(link)
            if self.listed.get(target, "l")[0] != "f":
                raise Stop(3, "tar.link", f"{show(name)} is a hard link to {show(target)}, which is not there")
            try:
                os.link(self.root + b"/" + target, self.fresh(name))
            except OSError as error:
                if error.errno not in (errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP):
                    raise
                shutil.copy2(self.root + b"/" + target, self.root + b"/" + name)
            self.listed[name] = self.listed[target]
            self.files += 1
        else:
            raise Stop(4, "entry.type", f"{show(name)}: entries of type {show(kind)} are refused")

    def write(self, path, name, data, size, mode, when):
        value = hashlib.sha256()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            for part in data:
                value.update(part)
                while part:
                    part = part[os.write(fd, part):]
            os.fchmod(fd, mode)
            os.utime(fd, (when, when))
        finally:
            os.close(fd)
        self.listed[name] = ["f", size, mode, value.hexdigest()]
        self.files += 1

    def finish(self):
        for name, (mode, when) in sorted(self.folders.items(), reverse=True):
            path = self.root + b"/" + name
            if when:
                os.utime(path, (when, when))
            os.chmod(path, mode)


def runtime_root(staging):
    """Where the archive's prefix lies: down from the top while there is one folder and nothing else."""
    place = staging
    while not os.path.isdir(os.path.join(place, "envs")):
        inside = os.listdir(place)
        below = os.path.join(place, inside[0]) if len(inside) == 1 else ""
        if not below or os.path.islink(below) or not os.path.isdir(below):
            raise Stop(3, "install.archive", "this archive holds no runtime: no folder envs/ in it")
        place = below
    return place


def interpreters(root):
    """Every environment's Python must start from where it is now, off the shipped one where there is one."""
    envs, shipped = os.path.join(root, "envs"), os.path.join(root, "python")
    for tier in sorted(os.listdir(envs)):
        python = os.path.join(envs, tier, "bin", "python")
        if not os.path.lexists(python):
            continue
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LD_", "VIRTUAL_ENV"))}
        try:
            done = subprocess.run([python, "-I", "-B", "-c", "import sys, encodings; print(sys.base_prefix)"],
                                  env=clean, capture_output=True, text=True, timeout=120, close_fds=True)
            wrong = done.returncode and done.stderr.strip()[-300:] or ""
            base = done.stdout.strip()
            if not wrong and os.path.isdir(shipped) and os.path.realpath(base) != os.path.realpath(shipped):
                raise Stop(3, "install.interpreter", f"the interpreter of {tier} runs off {base}, not off the shipped one")
        except (OSError, subprocess.TimeoutExpired) as error:
            wrong = str(error)
        if wrong:
            raise Stop(3, "install.interpreter", f"the interpreter of {tier} does not start: {wrong}")


def install(archive, sha, place, checked=""):
    hashed = None if checked else digest(archive, sha)
    parent, name = os.path.split(place)
    staging = os.path.join(parent, f".{name}.staging-{os.uname().nodename}-{os.getpid()}")
    earlier = os.path.join(parent, f".{name}.failed")
    if os.path.isfile(os.path.join(earlier, FAILED)):
        clear(earlier, "an earlier failure")
    try:
        with open(archive, "rb", buffering=0) as file:
            before, size = identity(file), os.fstat(file.fileno()).st_size
            unchanged(archive, hashed or before, before)
            free_space(staging, unpacked_size(file, size) + (16 << 20), "unpacking")
            os.mkdir(staging, 0o755)
            unpacker = Unpacker(staging)
            for entry in entries(source := Source(blocks(file))):
                unpacker.add(source, *entry)
            unchanged(archive, before, identity(file))
        root = runtime_root(staging)
        if os.path.lexists(os.path.join(root, OWN)):
            raise Stop(3, "install.archive", f"this archive was made of an installation: there is {OWN} in it, which only "
                       "this script writes")
        interpreters(root)
        write_records(root, staging, unpacker, sha, size, place)
        unpacker.finish()
        publish(root, place, sha)
    except BaseException:
        keep_failed(staging, earlier)
        raise
    remove(staging)


def write_records(root, staging, unpacker, sha, size, place):
    strip = os.fsencode(os.path.relpath(root, staging)) + b"/"
    strip = b"" if strip == b"./" else strip
    own = os.path.join(root, OWN)
    os.mkdir(own, 0o755)
    everything = {**{name: ["d", mode] for name, (mode, _) in unpacker.folders.items()}, **unpacker.listed}
    everything[strip] = everything.pop(strip.rstrip(b"/"))
    listed = {os.fsdecode(name[len(strip):]): value for name, value in everything.items() if name.startswith(strip)}
    with gzip.GzipFile(os.path.join(own, FILES), "wb", 1, mtime=0) as file:
        file.write(json.dumps(listed, separators=(",", ":"), sort_keys=True).encode())
    with open(os.path.join(own, FILES), "rb") as file:
        check = hashlib.sha256(file.read()).hexdigest()
        os.fsync(file.fileno())
    # Schema 1 listed no folders.
    found = {"schema": 2, "sha256": sha, "size": size, "files": unpacker.files, "prefix": place, "list_sha256": check,
             "installed": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    write_record(os.path.join(own, RECORD), found)


def write_record(path, found):
    with open(path, "w") as file:
        json.dump(found, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def publish(root, place, sha):
    # The marker goes with the tree: both appear by one rename. Another start may have been faster.
    mode = stat.S_IMODE(os.stat(root).st_mode)
    os.chmod(root, mode | 0o700)
    try:
        os.rename(root, place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        found = record(place)
        if found is None or found.get("sha256") != sha:
            raise Stop(6, "install.differs", f"something else appeared at {place} meanwhile; it was left alone") from None
        say("another start was faster; its installation is kept")
    os.chmod(place, mode)
    fd = os.open(os.path.dirname(place), os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def remove(place):
    def again(function, path, _error):
        os.chmod(os.path.dirname(path), 0o700)
        os.chmod(path, 0o700) if os.path.isdir(path) and not os.path.islink(path) else None
        shutil.rmtree(path) if function is not os.unlink else function(path)
    standing = mounted(place)
    if standing:  # rmtree would empty it first
        raise OSError(errno.EBUSY, f"{standing} is mounted")
    if os.path.lexists(place):
        shutil.rmtree(place, onerror=again)


def mounted(place):
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            points = [line.split(b" ")[4] for line in file]
    except OSError:
        return ""
    for code, char in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
        points = [point.replace(code, char) for point in points]
    below = os.fsencode(os.path.realpath(place)) + b"/"
    return next((os.fsdecode(point) for point in points if (point + b"/").startswith(below)), "")


def clear(place, whose):
    say(f"removing what {whose} left: {place}")
    try:
        remove(place)
    except OSError as error:
        say(f"{place} stays, whoever owns it can remove it: {error.strerror}")


def keep_failed(staging, failed):
    if os.path.isdir(staging):
        try:
            os.chmod(staging, 0o700)
            mark(os.path.join(staging, FAILED))
            os.rename(staging, failed)
        except OSError:
            failed = staging
        say(f"what was unpacked is kept in {failed}; the next start removes it")


def mark(path):
    """Says whose the folder is. The archive may have brought something of that name; a full disk leaves the name alone."""
    if os.path.isdir(path) and not os.path.islink(path):
        remove(path)
    elif os.path.lexists(path):
        os.unlink(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(OSError):
        os.write(fd, b"left by ensure_runtime.sh for diagnosis; the next start removes it\n")
    os.close(fd)


# ---- an installation that is there

def same_file(place, name, want, quick):
    path = os.path.join(os.fsencode(place), os.fsencode(name))
    try:
        found = os.lstat(path)
        if want[0] == "d":
            # A folder may inherit the bit that gives its group to what is made in it.
            return stat.S_ISDIR(found.st_mode) and found.st_mode & 0o777 == want[1]
        if want[0] == "l":
            return stat.S_ISLNK(found.st_mode) and os.readlink(path) == os.fsencode(want[1])
        if not stat.S_ISREG(found.st_mode) or found.st_size != want[1] or stat.S_IMODE(found.st_mode) != want[2]:
            return False
        if quick:
            return True
        value = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while block := file.read(1 << 20):
                value.update(block)
        return value.hexdigest() == want[3]
    except OSError:
        return False


def recheck(place):
    try:
        with open(os.path.join(place, OWN, FILES), "rb") as file:
            packed = file.read()
        if hashlib.sha256(packed).hexdigest() != (record(place) or {}).get("list_sha256"):
            raise ValueError("its list of files was changed")
        listed = json.loads(gzip.decompress(packed))
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise Stop(3, "install.damaged", f"{place} cannot be checked: {error}; remove it and install again") from None
    quick = os.environ.get("NRL_RECHECK") == "quick"
    wanted = [(name, want) for name, want in listed.items() if not VOLATILE.search(name)]
    good = pooled(lambda item: same_file(place, *item, quick), wanted)
    wrong = [name for (name, _), fine in zip(wanted, good) if not fine and not follows(place, name, listed)]
    wrong += [name or "." for name in strangers(place, listed)]
    if wrong:
        few = ", ".join(show(name) for name in sorted(name or "." for name in wrong)[:5])
        raise Stop(3, "install.damaged", f"{place}: {len(wrong)} files or folders are missing, changed or not from the "
                   f"archive: {few}. Nothing was repaired; remove it and install again"
                   + bytecode_advice(wrong, listed))
    settle(place)


def follows(place, name, listed):
    """Bytecode of a module that may be patched at run time, and was: Python makes it anew."""
    found = BYTECODE.match(name)
    source = found and f"{found[1]}{found[2]}.py"
    return bool(source and VOLATILE.search(source) and source in listed and not same_file(place, source, listed[source], False))


def strangers(place, listed):
    """What the archive did not bring. Bytecode of a module that it did is none, if no Python of the archive reads it."""
    pythons = {found[3] for found in map(BYTECODE.match, listed) if found}
    folders = any(want[0] == "d" for want in listed.values())
    top = os.fsencode(place)

    def known(path):
        found = BYTECODE.match(path)
        return (path in listed or VOLATILE.search(path)
                or found and f"{found[1]}{found[2]}.py" in listed and found[3] not in pythons)

    for folder, below, names in os.walk(top):
        below[:] = [b for b in below if not (folder == top and b == OWN.encode())]
        inside = {n: os.fsdecode(os.path.relpath(os.path.join(folder, n), top)) for n in (*names, *below)}
        yield from (inside[n] for n in names if not known(inside[n]))
        for name in below:
            path = inside[name]
            if os.path.islink(os.path.join(folder, name)):
                if not known(path):
                    yield path
            elif folders and path not in listed and name != b"__pycache__":
                yield path


def bytecode_advice(wrong, listed):
    if not all(BYTECODE.match(name) and name not in listed for name in wrong):
        return ""
    return " (or remove only these: they are bytecode, as running Python there without activate.sh writes it)"


def settle(place):
    """An intact installation that was moved is at home where it is now."""
    found = record(place)
    if os.path.realpath(str(found.get("prefix"))) == os.path.realpath(place):
        return
    path = os.path.join(place, OWN, RECORD)
    say(f"it was installed at {found.get('prefix')} and moved here, which is recorded")
    try:
        write_record(f"{path}.new", {**found, "prefix": place})
        os.chmod(f"{path}.new", stat.S_IMODE(os.stat(path).st_mode))
        os.rename(f"{path}.new", path)
    except OSError as error:
        say(f"{path} cannot be written ({error.strerror}): check_runtime.py will go on saying that it was moved")


def run(command, *arguments):
    stop_on_signals()
    commands = {"begin": begin, "folder": lambda path: os.makedirs(path, exist_ok=True), "lock": lock, "state": state,
                "space": space, "size": lambda path: print(os.path.getsize(path)), "digest": digest_part,
                "install": install, "recheck": recheck}
    try:
        return commands[command](*arguments) or 0
    except Stop as stop:
        print(f"ensure_runtime: error [{stop.code}]: {stop}", file=sys.stderr)
        return stop.status
    except Stopped as stopped:
        say(f"stopped by {signal.Signals(stopped.args[0]).name}")
        return 128 + stopped.args[0]
    except OSError as error:
        code = {errno.ENOSPC: "io.space", errno.EDQUOT: "io.space", errno.EROFS: "io.readonly",
                errno.EACCES: "io.readonly", errno.EPERM: "io.readonly"}.get(error.errno, "io.error")
        print(f"ensure_runtime: error [{code}]: {error}", file=sys.stderr)
        return 5


sys.exit(run(*sys.argv[1:]))
PYTHON

main "$@"
