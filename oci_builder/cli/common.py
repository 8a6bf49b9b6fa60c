"""What all commands share: settings, progress, output, and the one place where errors become exit statuses."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import click
from click.core import ParameterSource

from oci_builder.model.errors import OciBuilderError, SpecError, TransportError, disk_error
from oci_builder.model.events import Emit
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.model.platform import check_platform_name
from oci_builder.model.redact import redact, redact_value, secret_values
from oci_builder.model.spec import Spec, load_spec
from oci_builder.progress import rendering
from oci_builder.release.files import require_report_place, write_result

F = TypeVar("F", bound=Callable[..., Any])


class _Place(click.Path):
    """A path. An empty one, as an unset variable of a script gives, is not the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path; for the current folder write .", param, ctx)
        return super().convert(value, param, ctx)


ARCHIVE = _Place(path_type=Path)
MOST_JOBS = 256
PROGRESS = click.Choice(["auto", "bars", "json", "none"])
PROGRESS_HELP = "Bars on a terminal (auto), JSON lines for programs, or none; on standard error."
VERBOSE_HELP = "Notes on what is done, and where errors come from."


@dataclass(slots=True)
class Settings:
    """The group's options, and what a stage answered, for the scripts that call its command."""

    verbose: bool = False
    progress: str = "auto"
    answer: Any = None

    @contextmanager
    def emitting(self) -> Iterator[Emit]:
        """Progress for the time of a command."""
        with rendering(self.progress, verbose=self.verbose) as emit:
            yield emit


class QuietGroup(click.Group):
    """Commands whose reader may go away (``inspect X | head -1`` ends as other programs do, without a word), and whose
    usage errors quote no secret: a word in the wrong place may be one."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        """Read the options."""
        with _quoting_no_secret():
            return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        """Run; a closed standard output ends the program with 141, as SIGPIPE would, and Ctrl-C with 130."""
        try:
            with _quoting_no_secret():
                return super().invoke(ctx)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)
        except KeyboardInterrupt:
            # click would make it 1, which says that a check ran and said no.
            click.echo("interrupted", err=True)
            sys.exit(130)


@contextmanager
def _quoting_no_secret() -> Iterator[None]:
    try:
        yield
    except click.ClickException as error:
        # Final only by its annotation; the error must stay of its class, which renders itself.
        setattr(error, "message", hide(error.message))  # noqa: B010
        raise


def accept_settings(command: click.Command) -> click.Command:
    """Let a command take the group's ``-v`` and ``--progress`` too: people write them after the verb."""
    if isinstance(command, click.Group):
        for one in command.commands.values():
            accept_settings(one)
        return command

    def keep(context: click.Context, option: click.Parameter, value: Any) -> None:
        settings = context.ensure_object(Settings)
        if value and option.name is not None:
            setattr(settings, option.name, value)

    more = (
        click.Option(["-v", "--verbose"], is_flag=True, expose_value=False, callback=keep, help=VERBOSE_HELP),
        click.Option(["--progress"], type=PROGRESS, expose_value=False, callback=keep, help=PROGRESS_HELP),
    )
    command.params.extend(more)
    return command


PLATFORM = click.option(
    "--platform", default="linux/amd64", show_default=True, metavar="OS/ARCH", help="Which image of an index.",
    callback=lambda _context, _option, text: check_platform_name(text),
)  # fmt: skip
IMAGE = click.option(
    "--image", default="", metavar="NAME|DIGEST", callback=lambda _context, option, text: _image(option, text),
    help="Which image of an archive that holds several.",
)  # fmt: skip
pass_settings = click.make_pass_decorator(Settings, ensure=True)


def _image(option: click.Parameter, text: str) -> str:
    """An empty one, as an unset variable of a script gives, is not the same as none."""
    if not text and click.get_current_context().get_parameter_source(option.name or "") is not ParameterSource.DEFAULT:
        raise click.BadParameter("an empty name", param=option)
    return text


def default_cache() -> Path:
    """``$OCI_BUILDER_CACHE``, else ``oci-builder`` in the user's cache folder."""
    if found := os.environ.get("OCI_BUILDER_CACHE"):
        return Path(found)
    # The XDG base directory specification has relative paths ignored.
    said = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(said) if said.startswith("/") else Path.home() / ".cache") / "oci-builder"


def default_jobs() -> int:
    """The CPUs that this process may use, as far as ``--jobs`` goes."""
    return min(len(os.sched_getaffinity(0)), MOST_JOBS)


def cache_option(function: F) -> F:
    """``--cache DIR``."""
    option: Any = click.option(
        "--cache", type=ARCHIVE, default=default_cache, show_default="$OCI_BUILDER_CACHE, else the user's cache folder",
        help="Folder of blobs and build records, shared by builds.",
    )  # fmt: skip
    return cast(F, option(function))


def json_option(function: F) -> F:
    """``--json``: the result as JSON on standard output instead of lines for people."""
    option: Any = click.option(
        "--json", "json_file", flag_value="-", default=None, help="The result as JSON on standard output."
    )
    return cast(F, option(function))


def report_place(_context: click.Context, option: click.Parameter, target: str | None) -> str | None:
    """The FILE of ``--json``, when a report can be written there: found out before hours of work, not after.

    Raises:
        ConflictError: ``report.exists``: an archive, say; SpecError, TransportError: as ``require_report_place``.
    """
    if target == "":
        raise click.BadParameter("an empty path", param=option)
    if target not in (None, "-"):
        require_report_place(Path(target))
    return target


def hide(text: str) -> str:
    """``text`` without what looks like a credential, or is one in this process's environment."""
    return redact(text, secret_values(os.environ))


def json_bytes(value: Any) -> bytes:
    """A result as ``--json`` prints it."""
    shown = redact_value(value, secret_values(os.environ))
    text = json.dumps(shown, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def write_json(value: Any, target: str | None) -> None:
    """Write a result; ``-`` is standard output, ``None`` nowhere.

    A file appears only when it is complete. A pipe, device or link (``/dev/stderr``) is written to, never replaced.
    """
    if target is None:
        return
    data = json_bytes(value)
    if target == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    write_result(Path(target), data)


def spec_and_limits(path: Path | None) -> tuple[Spec | None, Limits]:
    """The spec of ``--spec``, and the limits that hold."""
    if path is None:
        return None, DEFAULT_LIMITS
    spec = load_spec(path)
    return spec, spec.effective_limits


def say(line: str) -> None:
    """A line of the result, for people; control characters of untrusted names never reach the terminal."""
    click.echo(_printable(line))


def complain(line: str) -> None:
    """A line on standard error, as ``say``."""
    click.echo(_printable(line), err=True)


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in hide(line))


def fail(error: OciBuilderError, verbose: bool) -> NoReturn:
    """Print an error and exit with its status."""
    if verbose:
        _traceback(error)
    click.echo(f"error[{error.code}]: {hide(error.message)}", err=True)
    sys.exit(error.exit_status)


def _traceback(error: BaseException) -> None:
    # As one text: a secret may be on several lines, such as a key's.
    click.echo(hide("".join(traceback.format_exception(error))), err=True, nl=False)


def hide_in_tracebacks() -> None:
    """What nobody expected is printed by Python itself, with all that its text quotes."""
    sys.excepthook = lambda _kind, error, _trace: _traceback(error)


@contextmanager
def exit_statuses(verbose: bool = False) -> Iterator[None]:
    """Turn every error that a user or an input can cause into a line and an exit status."""
    try:
        yield
    except OciBuilderError as error:
        fail(error, verbose)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        fail(disk_error(error, "the operation"), verbose)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):
            raise
        what = f"this machine gives us no more {'memory' if isinstance(error, MemoryError) else 'threads'}"
        fail(TransportError("io.error", f"{what}; its limits (ulimit, those of a container) are too low"), verbose)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("oci_builder"):
            raise
        extra = {"huggingface_hub": "hub", "modal": "modal", "docker": "docker", "cyclonedx": "payload"}
        name = extra.get(str(error.name).split(".")[0], "")
        hint = f"pip install 'oci-builder[{name}]'" if name else f"pip install {error.name}"
        fail(SpecError("spec.extra", f"this command needs the package {error.name}: {hint}"), verbose)
