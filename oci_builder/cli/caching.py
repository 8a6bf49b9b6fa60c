"""Commands about the cache: cache show, cache prune."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oci_builder.cli.common import Settings, cache_option, complain, json_option, pass_settings, say, write_json
from oci_builder.model.sizes import human

if TYPE_CHECKING:
    from oci_builder.cache import Contents, Pruned

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)\s*(?:([kMGT])(i?)B?|B)?", re.IGNORECASE)
_NAMED = 10
KEEP_DAYS = 30.0


def size_of(text: str) -> int:
    """Bytes of a size as people write it.

    >>> size_of("1.5GB"), size_of("2 GiB"), size_of("512")
    (1500000000, 2147483648, 512)

    Raises:
        click.BadParameter: it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is no size; write 50GB, 20GiB or a number of bytes")
    step = 1024 if found[3] else 1000
    return int(float(found[1]) * step ** ("kmgt".index(found[2].lower()) + 1 if found[2] else 0))


def _number(days: float | None) -> float | None:
    if days is not None and days != days:
        raise click.BadParameter("not a number")
    return days


@click.group()
def cache() -> None:
    """What builds, stages and sandboxes keep for the next time."""


@cache.command("show", short_help="Show what the cache holds.")
@cache_option
@json_option
@pass_settings
def show(settings: Settings, cache: Path, json_file: str | None) -> None:
    """Show what the cache holds, how large it is, and when it was last used."""
    from oci_builder.cache import show_cache

    with settings.emitting() as emit:
        found = show_cache(cache, emit)
    write_json(found.to_json(), json_file)
    if json_file == "-":
        return
    for kind, row in found.kinds().items():
        say(f"{row['count']:6} {kind:<20} {human(row['size']):>10}  last used {row['used'][:10]}")
    say(f"{found.cache}: {human(found.size)} in all; files that several of these share count once in that")
    _tell_foreign(found)


@cache.command("prune")
@click.option(
    "--keep-days", type=click.FloatRange(0, 1e6), default=None, metavar="N", callback=lambda _c, _o, n: _number(n),
    help=f"Remove what nobody used for N days; {KEEP_DAYS:.0f} when --max-size is not given either.",
)  # fmt: skip
@click.option(
    "--max-size", default=None, metavar="SIZE", callback=lambda _c, _o, text: None if text is None else size_of(text),
    help="Then remove what was not used for longest, until the cache takes no more (50GB, 20GiB).",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@cache_option
@json_option
@pass_settings
def prune(
    settings: Settings, keep_days: float | None, max_size: int | None, dry_run: bool, cache: Path, json_file: str | None
) -> None:
    """Remove from the cache what was not used of late. Archives that were built lie elsewhere and stay.

    What a build, a stage or a sandbox uses just now stays, and so does what is none of the cache's own. What goes is
    made or fetched again when it is wanted.
    """
    from oci_builder.cache import PruneOptions, prune_cache

    days = KEEP_DAYS if keep_days is None and max_size is None else keep_days
    with settings.emitting() as emit:
        done = prune_cache(cache, PruneOptions(days, max_size, dry_run), emit)
    write_json(done.to_json(), json_file)
    if json_file != "-":
        _tell(done)
    if done.failed:
        raise done.failed[0][1]


def _tell(done: Pruned) -> None:
    verb = "would go" if done.dry_run else "removed"
    kinds: dict[str, int] = {}
    for one in done.removed:
        kinds[one.kind] = kinds.get(one.kind, 0) + 1
        if done.dry_run:
            say(f"{one.kind:<20} {one.place}")
    for kind, count in kinds.items():
        say(f"{count:6} {kind:<20} {verb}")
    say(f"{done.before.cache}: {human(done.before.size - done.size)} {verb}, {human(done.size)} left")
    if done.in_use:
        complain(f"in use, and left: {len(done.in_use)}, such as {done.in_use[0].place}")
    for place, error in done.failed[:_NAMED]:
        complain(f"{place} stays: {error.message}")
    _tell_foreign(done.before)


def _tell_foreign(found: Contents) -> None:
    for place in found.foreign[:_NAMED]:
        complain(f"{place} is none of the cache's own and stays")
    if len(found.foreign) > _NAMED:
        complain(f"and {len(found.foreign) - _NAMED} more")


CACHE_COMMANDS: tuple[click.Command, ...] = (cache,)
