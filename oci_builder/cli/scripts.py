"""What ``modal run modal_build.py`` and its like do: the stage command, started by Modal's own client."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from oci_builder.cli.common import exit_statuses


def script_app(name: str) -> Any:
    """The App of a script."""
    with exit_statuses():
        from oci_builder.engines.modal_request import load_engine

        return load_engine().script(name)


def run_script(words: Sequence[str], *stages: str) -> None:
    """Run one of the stages. All words but ``--stage NAME`` are options of ``oci-builder stage``.

    Args:
        words: after the script's name.
        stages: those that the script runs; a single one needs no ``--stage``.
    """
    from oci_builder.cli import cli
    from oci_builder.engines.modal_request import chosen

    if "--help" in words or "-h" in words:
        sys.exit(cli(["stage", "--help"]))
    try:
        with exit_statuses():
            cli(["stage", *chosen(words, stages), "--on", "modal"])
    except SystemExit as end:
        # Modal marks an App as failed by any exception.
        if end.code not in (0, None):
            raise
