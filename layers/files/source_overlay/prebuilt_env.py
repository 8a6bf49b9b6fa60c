"""Interpreters that are already built, in place of environments that uv makes at run time.

With ``NEMO_RL_PREBUILT_ENV_ROOT=DIR`` a worker's interpreter is ``DIR/<tier>/bin/python``, and nothing calls uv.
Without the variable every function here gives back what it was given. Standard library only: imported before Ray.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

VARIABLE = "NEMO_RL_PREBUILT_ENV_ROOT"
SYSTEM_VARIABLE = "NEMO_RL_PY_EXECUTABLES_SYSTEM"
# The extras of an upstream command -> the tier that has them. Nothing else is in this runtime.
TIERS = {frozenset(): "base", frozenset({"automodel"}): "automodel", frozenset({"vllm"}): "vllm"}
INSTEAD = "use policy.dtensor_cfg.enabled=true and policy.dtensor_cfg._v2=true"
_ADVICE = {
    "modelopt": f"leave quant_cfg unset; {INSTEAD}",
    "fsdp": INSTEAD,
    "mcore": f"{INSTEAD}, with policy.megatron_cfg.enabled=false",
    "sglang": "use policy.generation.backend=vllm",
    "nemo_gym": "use env.should_use_nemo_gym=false and one of the environments of nemo_rl.environments",
}


class PrebuiltEnvError(RuntimeError):
    """The prebuilt runtime cannot do what was asked for; the text says what to use instead."""


def enabled() -> bool:
    """Whether prebuilt interpreters are in use. Checks the variables.

    Raises:
        PrebuiltEnvError: both variables are set, or the folder cannot work.
    """
    root = os.environ.get(VARIABLE, "")
    if not root:
        return False
    if os.environ.get(SYSTEM_VARIABLE, "0") == "1":
        raise PrebuiltEnvError(f"{VARIABLE} and {SYSTEM_VARIABLE}=1 exclude each other; unset {SYSTEM_VARIABLE}")
    # Ray starts workers through a shell, without quoting.
    if not re.fullmatch(r"/[A-Za-z0-9._/+@=-]+", root):
        raise PrebuiltEnvError(f"{VARIABLE}={root!r} must be an absolute path of letters, digits and ._/+@=-")
    if not os.path.isdir(root):
        raise PrebuiltEnvError(f"{VARIABLE}={root} is no folder on this node")
    return True


def interpreter(tier: str) -> str:
    """The interpreter of a tier.

    Raises:
        PrebuiltEnvError: it is not there.
    """
    path = os.path.join(os.path.normpath(os.environ[VARIABLE]), tier, "bin", "python")
    if not os.access(path, os.X_OK):
        raise PrebuiltEnvError(f"the {tier} tier has no interpreter: {path} cannot be run on this node")
    return path


def resolve(command: str, actor: str = "") -> str:
    """The interpreter for an upstream command (``uv run … --extra X``, or a path); the command itself when not enabled.

    Raises:
        PrebuiltEnvError: a combination of extras that this runtime does not have.
    """
    if not enabled():
        return command
    words = command.split()
    if not words or os.path.basename(words[0]) != "uv":
        # The driver's own interpreter is the base tier's; a path that somebody chose is his.
        return interpreter("base") if command == sys.executable else command
    wanted = frozenset(_extras(words))
    if wanted not in TIERS:
        raise unavailable(wanted, actor)
    return interpreter(TIERS[wanted])


def _extras(words: list[str]) -> Iterator[str]:
    for index, word in enumerate(words):
        if word in ("--extra", "--group", "--with") and index + 1 < len(words):
            yield words[index + 1]
        elif word.startswith(("--extra=", "--group=", "--with=")):
            yield word.partition("=")[2]
        elif word in ("--all-extras", "--all-groups"):
            yield word


def unavailable(extras: frozenset, actor: str = "") -> PrebuiltEnvError:
    """The error for extras that are not in this runtime."""
    known = [name for name in _ADVICE if name in extras] or sorted(extras)
    advice = _ADVICE.get(known[0], f"this runtime has {', '.join(sorted(TIERS.values()))}")
    who = f" of {actor}" if actor else ""
    return PrebuiltEnvError(f"the {'+'.join(sorted(extras))} tier{who} is not in this runtime: {advice}")


def refuse_uv(what: str) -> None:
    """Called where upstream is about to build an environment.

    Raises:
        PrebuiltEnvError: always, when prebuilt interpreters are in use.
    """
    if enabled():
        raise PrebuiltEnvError(f"{what}: no environment is built while {VARIABLE} is set; its tiers are complete")


def may_patch(path: str) -> bool:
    """Whether upstream may write a fix into an installed file, with a lock beside it; True when not enabled."""
    lock = f"{path}.patch_lock"
    beside = lock if os.path.exists(lock) else os.path.dirname(path)
    return not enabled() or (os.access(path, os.W_OK) and os.access(beside, os.W_OK))


def as_installed(path: str) -> tuple[str, Callable[[str], None]]:
    """An installed file's content, and what takes the place of writing to it: a word that it was left as it is.

    A read-only image, or another user's installation, is no reason for a worker to die.
    """

    def leave(_content: str) -> None:
        why = "cannot be written by this user, so upstream's fix is not in it; let a worker start once where it can be"
        print(f"{VARIABLE}: {path} {why}", file=sys.stderr, flush=True)

    with open(path, encoding="utf-8") as file:
        return file.read(), leave


def preflight(config: Any) -> None:
    """Refuse a configuration that this runtime cannot run, before anything starts. All reasons at once.

    Raises:
        PrebuiltEnvError: see above.
    """
    if not enabled():
        return
    reasons = list(dict.fromkeys(_reasons(config)))
    for tier in sorted(set(TIERS.values())):
        try:
            interpreter(tier)
        except PrebuiltEnvError as error:
            if _needs(config, tier):
                reasons.append(str(error))
    if reasons:
        raise PrebuiltEnvError("this configuration does not run on the prebuilt runtime:\n  " + "\n  ".join(reasons))


def _needs(config: Any, tier: str) -> bool:
    if tier == "vllm":
        return _get(config, "policy", "generation") is not None or _get(config, "generation") is not None
    return tier == "base" or any(section is not None for _, section in _models(config))


def _reasons(config: Any) -> Iterator[str]:
    for name, section in _models(config):
        if _on(section, "megatron_cfg", "enabled"):
            yield f"{name}.megatron_cfg.enabled needs the mcore tier: {_for(name, _ADVICE['mcore'])}"
        if _on(section, "dtensor_cfg", "enabled") and not _on(section, "dtensor_cfg", "_v2"):
            yield f"{name}.dtensor_cfg without _v2 needs the fsdp tier: {_for(name, _ADVICE['fsdp'])}"
        if _get(section, "quant_cfg") is not None:
            yield f"{name}.quant_cfg needs the modelopt tier: {_for(name, _ADVICE['modelopt'])}"
    for name, section in (("policy.generation", _get(config, "policy", "generation")),
                          ("generation", _get(config, "generation"))):  # fmt: skip
        backend = _get(section, "backend")
        if backend not in (None, "vllm"):
            extra = {"megatron": "mcore"}.get(backend, backend)
            yield f"{name}.backend={backend} needs the {extra} tier: use {name}.backend=vllm"
        if _get(section, "quant_cfg") is not None:
            yield f"{name}.quant_cfg needs the modelopt tier: leave it unset"
    if _on(config, "env", "should_use_nemo_gym"):
        yield f"env.should_use_nemo_gym needs the nemo_gym tier: {_ADVICE['nemo_gym']}"
    teachers = _get(config, "on_policy_distillation")
    if teachers is not None and _get(teachers, "enabled") is not False:
        yield (
            "on_policy_distillation starts its teachers on the mcore tier whatever they are configured for: use "
            "examples/run_xtoken_off_policy_distillation.py or examples/run_distillation.py"
        )


def _models(config: Any) -> Iterator[tuple[str, Any]]:
    """Every part of a configuration that describes a model with a training backend."""
    for name in ("policy", "value", "teacher"):
        yield name, _get(config, name)
    teachers = _get(config, "teachers")
    items = teachers.items() if isinstance(teachers, Mapping) else enumerate(teachers or ())
    for index, section in items:
        yield f"teachers.{index}", section
    for name in ("reward_model", "reward_model_environment"):
        yield f"env.{name}", _get(config, "env", name)


def _for(name: str, advice: str) -> str:
    return advice.replace("policy.", f"{name}.")


def _get(value: Any, *path: str) -> Any:
    for key in path:
        if isinstance(value, Mapping):
            value = value.get(key)
        else:
            value = getattr(value, key, None)
        if value is None:
            return None
    return value


def _on(value: Any, *path: str) -> bool:
    return bool(_get(value, *path))
