"""The command line. Only this package and ``engines`` import the verbs; each command imports its own when it runs."""

from __future__ import annotations

import click

from oci_builder import __version__
from oci_builder.cli.caching import CACHE_COMMANDS
from oci_builder.cli.common import (
    PROGRESS,
    PROGRESS_HELP,
    VERBOSE_HELP,
    QuietGroup,
    Settings,
    accept_settings,
    exit_statuses,
    hide_in_tracebacks,
)
from oci_builder.cli.images import IMAGE_COMMANDS
from oci_builder.cli.payload import PAYLOAD_COMMANDS
from oci_builder.cli.releases import RELEASE_COMMANDS
from oci_builder.cli.stages import STAGE_COMMANDS
from oci_builder.cli.streams import open_standard_streams

__all__ = ["cli", "main"]


@click.group(cls=QuietGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="oci-builder")
@click.option("-v", "--verbose", is_flag=True, help=VERBOSE_HELP)
@click.option("--progress", type=PROGRESS, default="auto", show_default=True, help=PROGRESS_HELP)
@click.pass_context
def cli(context: click.Context, verbose: bool, progress: str) -> None:
    """Build reproducible OCI images of big Python/CUDA runtimes, verify anybody's, and ship them with evidence.

    Exit status: 0 good; 1 a check ran and said no; 2 the inputs are wrong; 3 bytes are not what they claim; 4 refused
    by policy; 5 network, daemon or disk; 6 conflict.
    """
    context.obj = Settings(verbose, progress)


@cli.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell, e.g. eval "$(oci-builder completion bash)"."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "oci-builder", "_OCI_BUILDER_COMPLETE").source())


for _command in (*IMAGE_COMMANDS, *PAYLOAD_COMMANDS, *RELEASE_COMMANDS, *STAGE_COMMANDS, *CACHE_COMMANDS):
    cli.add_command(accept_settings(_command))


def main() -> None:
    """Entry point of the console script."""
    import sys

    open_standard_streams()
    hide_in_tracebacks()
    ours = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    verbose = any(word in ("-v", "--verbose") for word in ours)
    with exit_statuses(verbose):
        cli(prog_name="oci-builder")
