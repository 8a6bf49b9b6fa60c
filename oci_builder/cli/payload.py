"""Commands about the payload: relocate."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from oci_builder.cli.common import ARCHIVE, default_jobs, json_option, say, write_json


@click.command("relocate", short_help="Make environments work from any prefix, and audit them.")
@click.argument("tree", type=ARCHIVE)
@click.option("--prefix", default="", metavar="DIR", show_default="where it is",
              help="Where the tree will live.")  # fmt: skip
@click.option("--was", multiple=True, metavar="DIR[=PLACE]",
              help="Where the tree, or its PLACE (as python), was made; may be repeated.")  # fmt: skip
@click.option("--external", multiple=True, metavar="PATTERN",
              help="Absolute link targets that every user has; may be repeated.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Write nothing: exit status 1 when there is something to do.")
@click.option("--jobs", type=click.IntRange(1, 256), default=default_jobs, show_default="CPUs", help="Threads.")
@json_option
def relocate_command(
    tree: Path, prefix: str, was: tuple[str, ...], external: tuple[str, ...], dry_run: bool, jobs: int,
    json_file: str | None,
) -> None:  # fmt: skip
    """Make TREE (an environment, or a folder with envs/ and python/) work from any prefix, and audit it.

    Exit status 1: the audit found something that still hangs on where it was made.
    """
    from oci_builder.relocation import RelocateOptions, relocate

    for option, place in (("--prefix", prefix or "/"), *(("--was", name) for name in was)):
        if not place.startswith("/"):
            raise click.BadParameter(f"{place!r} is not absolute", param_hint=option)
    parts = dict(word.partition("=")[::2] for word in was)
    found = relocate(tree, RelocateOptions(prefix, parts, external, not dry_run, jobs))
    write_json(found.to_json(), json_file)
    if json_file != "-":
        for line in found.lines():
            say(line)
        done = "would be changed" if dry_run else "changed"
        say(f"{tree}: {len(found.changes)} {done}, {len(found.findings)} found by the audit")
    sys.exit(0 if found.ok else 1)


PAYLOAD_COMMANDS: tuple[click.Command, ...] = (relocate_command,)
