"""Environment variables that name folders."""

from __future__ import annotations

_FOLDERS = ("_HOME", "_ROOT", "_DIR")


def names_one_folder(name: str) -> bool:
    """Whether by custom the variable holds one path (``CUDA_HOME``)."""
    return name.endswith(_FOLDERS)


def is_hollow(name: str, value: str) -> bool:
    """Whether the value of a path variable has an empty component, which means the current folder (vllm#36077)."""
    return value != "" and "" in value.split(":") and (names_one_folder(name) or name.endswith("PATH"))
