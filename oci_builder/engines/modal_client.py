"""The way to ``modal_app``, for whoever can do without Modal's client."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from oci_builder.model.errors import OciBuilderError, SpecError


def load_engine() -> ModuleType:
    """``modal_app``, which imports Modal's client: that reads its settings while it is imported.

    Raises:
        SpecError: ``modal.config``: it cannot read them; ModuleNotFoundError: there is no client.
    """
    try:
        return import_module("oci_builder.engines.modal_app")
    except (ImportError, OciBuilderError):
        raise
    except Exception as error:
        said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise SpecError(
            "modal.config", f"Modal's client cannot read its settings: {said}; repair that file, or move it away and "
            "make a new one: modal token new", where="~/.modal.toml",
        ) from error  # fmt: skip
