# shellcheck shell=bash
# Set this shell's environment for the runtime in this folder; source it from bash or zsh. `deactivate_nrl` undoes it.
#
#   NEMO_RL_SOURCE_ROOT   a source tree to use instead of the shipped one: a folder that holds nemo_rl/ with the overlay
#                         (overlay/apply.py adds it; without it workers would build environments of their own)
#   NRL_CACHE_ROOT        where compilers and libraries cache, keyed by the archive below it; outside the prefix
#   NRL_ONLINE=1          do not set the offline variables
#
# Kept as they are: CUDA_VISIBLE_DEVICES, NCCL_*, and what is not named here. May be sourced again at any time.

if [ -z "${BASH_VERSION:-}${ZSH_VERSION:-}" ]; then
  echo 'activate.sh: this shell is neither bash nor zsh; source it from one of them' >&2
  # shellcheck disable=SC2317
  return 2 2>/dev/null || exit 2
fi

_nrl_say() { printf 'activate.sh: %s\n' "$*" >&2; }

# Set a variable (or, without a value, unset it), remembering what it was.
_nrl_set() {
  [ -z "${ZSH_VERSION:-}" ] || emulate -L sh
  case " ${_NRL_NAMES:-} " in
    *" $1 "*) ;;
    *)
      if eval "[ -n \"\${$1+set}\" ]"; then eval "_NRL_OLD_$1=\"=\${$1}\""; else eval "_NRL_OLD_$1="; fi
      _NRL_NAMES="${_NRL_NAMES:-} $1"
      ;;
  esac
  if [ "$#" -gt 1 ]; then export "$1=$2"; else unset "$1"; fi
}

deactivate_nrl() {
  [ -z "${ZSH_VERSION:-}" ] || emulate -L sh
  # Words are split here, and the caller's IFS may be anything.
  local _nrl_name _nrl_old IFS=' '
  for _nrl_name in ${_NRL_NAMES:-}; do
    eval "_nrl_old=\"\${_NRL_OLD_$_nrl_name:-}\""
    if [ -n "$_nrl_old" ]; then export "$_nrl_name=${_nrl_old#=}"; else unset "$_nrl_name"; fi
    unset "_NRL_OLD_$_nrl_name"
  done
  unset _NRL_NAMES
  hash -r 2>/dev/null || true
  [ "${1:-}" = keep ] || unset -f deactivate_nrl
}

# $1, and then what a path variable held, without empty parts (an empty part means the current folder) and without the
# parts of $1: a shell that was started from an activated one has them already.
_nrl_join() {
  local rest=":${2:-}:" own="$1:" part
  while [ -n "$own" ]; do
    part=:${own%%:*}:
    own=${own#*:}
    while [ "$rest" != "${rest/"$part"/:}" ]; do rest=${rest/"$part"/:}; done
  done
  while [ "$rest" != "${rest/::/:}" ]; do rest=${rest/::/:}; done
  rest=${rest#:}
  rest=${rest%:}
  printf '%s' "$1${rest:+:$rest}"
}

_nrl_activate() {
  [ -z "${ZSH_VERSION:-}" ] || emulate -L sh
  local prefix=$1 site key cache source cuda part
  case $prefix in
    *[!A-Za-z0-9._/+@=-]*)
      _nrl_say "the folder $prefix has characters that Ray's workers do not survive; install it elsewhere"; return 2 ;;
  esac
  if [ ! -x "$prefix/envs/base/bin/python" ]; then _nrl_say "$prefix holds no runtime (envs/base)"; return 2; fi
  if [ "${NEMO_RL_PY_EXECUTABLES_SYSTEM:-}" = 1 ]; then
    _nrl_say 'NEMO_RL_PY_EXECUTABLES_SYSTEM=1 and this runtime exclude each other; unset it'; return 2
  fi
  source=$prefix/source
  if [ -n "${NEMO_RL_SOURCE_ROOT:-}" ]; then source=$(_nrl_source "$NEMO_RL_SOURCE_ROOT" "$prefix") || return 2; fi
  case ${CUDA_HOME:-x} in
    *:*) _nrl_say "CUDA_HOME=$CUDA_HOME is not one folder; it is replaced" ;;
  esac
  key=$(sed -n 's/.*"sha256": *"\([0-9a-f]\{16\}\).*/\1/p' "$prefix/.nrl-install/installed.json" 2>/dev/null) || key=
  [ -n "$key" ] || key=prefix-$(printf '%s' "$prefix" | cksum | tr -d ' ')
  # Of an activated shell that started this one, the caches are no choice of the user's.
  if [ -n "${NRL_CACHE:-}" ] && [ "${XDG_CACHE_HOME:-}" = "$NRL_CACHE/xdg" ]; then
    cache=${NRL_CACHE_ROOT:-${NRL_CACHE%/*}}
    [ "${HF_HOME:-}" != "$NRL_CACHE/hf" ] || _nrl_set HF_HOME
    [ "${WANDB_DIR:-}" != "$NRL_CACHE/wandb" ] || _nrl_set WANDB_DIR
  else
    part=${HOME:-}
    part=${part%/}
    cache=${NRL_CACHE_ROOT:-${XDG_CACHE_HOME:-${part:+$part/.cache}}}
    if [ -z "$cache" ]; then cache=$(_nrl_home)/.cache || return 2; fi
    cache=${NRL_CACHE_ROOT:-$cache/nrl-runtime}
  fi
  # Either may be spelled through a link.
  part=$(realpath -m -- "$cache" 2>/dev/null) || part=$cache
  case $part/ in
    "$prefix"/* | "$(cd -P -- "$prefix" >/dev/null && pwd)"/*)
      _nrl_say "NRL_CACHE_ROOT=$cache is inside the prefix"; return 2 ;;
  esac
  case $cache in
    /*) ;;
    *) _nrl_say "NRL_CACHE_ROOT=$cache is not an absolute path"; return 2 ;;
  esac
  cache=$cache/$key
  part=$cache
  while [ -n "$part" ] && [ ! -e "$part" ]; do part=${part%/*}; done
  if [ ! -w "${part:-/}" ]; then _nrl_say "caches cannot be written in $cache: set NRL_CACHE_ROOT"; fi
  # No pattern of the shell's: the caller may have them off, or made an error of those that match nothing.
  site=$(find "$prefix/envs/base/lib" -mindepth 2 -maxdepth 2 -path '*/python3.*/site-packages' 2>/dev/null | sort | tail -n 1) || site=
  cuda=$prefix/cuda
  [ -d "$cuda" ] || cuda=/usr/local/cuda

  _nrl_set NRL_RUNTIME_ROOT "$prefix"
  _nrl_set NEMO_RL_PREBUILT_ENV_ROOT "$prefix/envs"
  _nrl_set PATH "$(_nrl_join "$prefix/envs/base/bin:$prefix/bin:$cuda/bin" "${PATH:-}")"
  _nrl_set VIRTUAL_ENV "$prefix/envs/base"
  [ -z "${NEMO_RL_SOURCE_ROOT:-}" ] || _nrl_set NEMO_RL_SOURCE_ROOT "$source"
  _nrl_set PYTHONPATH "$source"
  _nrl_set PYTHONNOUSERSITE 1
  _nrl_set PYTHONDONTWRITEBYTECODE 1
  _nrl_set NO_VCS_VERSION 1
  _nrl_cuda "$cuda" "$site"
  _nrl_caches "$cache"
  # Ray's sockets must stay below 108 bytes, and a scheduler's TMPDIR can be long.
  part=${RAY_TMPDIR:-}
  if [ -z "$part" ] || [ "${#part}" -gt 40 ]; then _nrl_set RAY_TMPDIR /tmp; fi
  [ "${NRL_ONLINE:-}" = 1 ] || _nrl_offline
  for part in NRL_CONTAINER NRL_FORCE_REBUILD_VENVS NEMO_RL_PY_EXECUTABLES_SYSTEM FLASHINFER_CUDA_ARCH_LIST PYTHONHOME \
    CONDA_PREFIX; do
    _nrl_set "$part"
  done
  hash -r 2>/dev/null || true
}

# A home where none is set: the system's word, else a folder that is this user's alone. Compiled code is loaded from below
# it, and in /tmp anybody can have made one of that name.
_nrl_home() {
  local place
  place=$(getent passwd "$(id -u)" 2>/dev/null | cut -d : -f 6) || place=
  if [ -n "$place" ] && [ -d "$place" ] && [ -w "$place" ]; then printf '%s' "$place"; return; fi
  place=/tmp/nrl-$(id -u)
  mkdir -m 700 -- "$place" 2>/dev/null || true
  if [ -L "$place" ] || [ ! -d "$place" ] || [ ! -O "$place" ] || ! chmod 700 -- "$place"; then
    _nrl_say "HOME is not set, and $place is not this user's own folder: set NRL_CACHE_ROOT"; return 2
  fi
  printf '%s' "$place"
}

# A source tree's absolute path, if it works here.
_nrl_source() { # tree prefix
  local place
  if [ ! -d "$1/nemo_rl" ]; then _nrl_say "NEMO_RL_SOURCE_ROOT=$1 holds no nemo_rl/"; return 2; fi
  place=$(CDPATH='' cd -- "$1" >/dev/null && pwd) || return 2
  case $place in
    *:*) _nrl_say "NEMO_RL_SOURCE_ROOT=$place: PYTHONPATH cannot name a folder with a colon"; return 2 ;;
  esac
  if ! grep -rqs --include='*.py' NEMO_RL_PREBUILT_ENV_ROOT "$place/nemo_rl"; then
    _nrl_say "NEMO_RL_SOURCE_ROOT=$place lacks the overlay: its workers would build environments of their own"
    _nrl_say "add it: $2/envs/base/bin/python $2/overlay/apply.py $place"
    return 2
  fi
  printf '%s' "$place"
}

_nrl_cuda() { # cuda site-packages
  local libraries='' part
  _nrl_set CUDA_HOME "$1"
  _nrl_set CUDA_PATH "$1"
  _nrl_set CPLUS_INCLUDE_PATH "$(_nrl_join "$1/include/cccl" "${CPLUS_INCLUDE_PATH:-}")"
  _nrl_set TORCH_CUDA_ARCH_LIST "${NRL_CUDA_ARCH_LIST:-10.0}"
  _nrl_set NVTE_CUDA_INCLUDE_DIR "$1/include"
  for part in "$2/nvidia/cudnn" "$2/nvidia/cu13"; do
    [ ! -d "$part/lib" ] || libraries=${libraries:+$libraries:}$part/lib
  done
  [ -n "$libraries" ] || return 0
  _nrl_set CUDNN_HOME "$2/nvidia/cudnn"
  _nrl_set CUDNN_PATH "$2/nvidia/cudnn"
  _nrl_set NVRTC_HOME "$2/nvidia/cu13"
  _nrl_set CURAND_HOME "$2/nvidia/cu13"
  # The wheels' libraries first; never the toolkit's, which are older, and never its stubs.
  _nrl_set LD_LIBRARY_PATH "$(_nrl_join "$libraries" "${LD_LIBRARY_PATH:-}")"
}

_nrl_caches() {
  _nrl_set NRL_CACHE "$1"
  _nrl_set XDG_CACHE_HOME "$1/xdg"
  _nrl_set XDG_CONFIG_HOME "$1/config"
  _nrl_set HF_HOME "${HF_HOME:-$1/hf}"
  _nrl_set VLLM_CACHE_ROOT "$1/vllm"
  _nrl_set VLLM_CONFIG_ROOT "$1/vllm-config"
  _nrl_set TRITON_CACHE_DIR "$1/triton"
  _nrl_set TRITON_HOME "$1/triton-home"
  _nrl_set TORCHINDUCTOR_CACHE_DIR "$1/inductor"
  _nrl_set TORCH_EXTENSIONS_DIR "$1/extensions"
  _nrl_set FLASHINFER_WORKSPACE_BASE "$1/flashinfer"
  _nrl_set DG_JIT_CACHE_DIR "$1/deep-gemm"
  _nrl_set TILELANG_CACHE_DIR "$1/tilelang"
  _nrl_set CUDA_CACHE_PATH "$1/cuda"
  _nrl_set NUMBA_CACHE_DIR "$1/numba"
  _nrl_set MPLCONFIGDIR "$1/mpl"
  _nrl_set WANDB_DIR "${WANDB_DIR:-$1/wandb}"
}

_nrl_offline() {
  local name
  for name in HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_DATASETS_OFFLINE FLASHINFER_NO_DOWNLOAD VLLM_NO_USAGE_STATS \
    DO_NOT_TRACK UV_OFFLINE PIP_NO_INDEX; do
    _nrl_set "$name" 1
  done
  _nrl_set RAY_USAGE_STATS_ENABLED 0
  _nrl_set RAY_ENABLE_UV_RUN_RUNTIME_ENV 0
  _nrl_set WANDB_MODE offline
}

if [ -n "${ZSH_VERSION:-}" ]; then
  eval '_nrl_self=${(%):-%x}'
else
  _nrl_self=${BASH_SOURCE[0]:-$0}
fi
_nrl_self=$(CDPATH='' cd -- "$(dirname -- "$_nrl_self")" >/dev/null && pwd)
deactivate_nrl keep
_nrl_status=0
_nrl_activate "$_nrl_self" || _nrl_status=$?
unset _nrl_self
if [ "$_nrl_status" -ne 0 ]; then deactivate_nrl; fi
unset -f _nrl_activate _nrl_home _nrl_source _nrl_cuda _nrl_caches _nrl_offline _nrl_join _nrl_set _nrl_say
# The status of this last line is the status of sourcing this file.
if [ "$_nrl_status" -eq 0 ]; then unset _nrl_status; else unset _nrl_status; (exit 2); fi
