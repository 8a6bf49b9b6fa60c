"""The uv program and the interpreters it works with: found, identified, run. Nothing is downloaded to get either."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from oci_builder.model.errors import IntegrityError, SpecError, TransportError, show

UV_VERSION = "0.11.18"
# uv's cache, below the folder of the environments.
CACHE_NAME = "uv-cache"
# What a build may see of the caller's shell: where programs, files, proxies and certificates are, and who asks. Flags
# and compilers (CFLAGS, LDFLAGS, CC, CMAKE_ARGS, MAKEFLAGS …) change what is built, and nothing of the shell is in a
# key: a tier's build_env names them.
_OF_SHELL = re.compile(
    r"PATH|HOME|USER|LOGNAME|TMPDIR|LD_LIBRARY_PATH|XDG_(?:CACHE|CONFIG|DATA)_HOME|XDG_CONFIG_DIRS|NETRC|SSH_AUTH_SOCK"
    r"|(?:https?|all|no|HTTPS?|ALL|NO)_(?:proxy|PROXY)|SSL_CERT_FILE|SSL_CERT_DIR|SSL_CLIENT_CERT|CURL_CA_BUNDLE"
    r"|REQUESTS_CA_BUNDLE|GIT_SSL_CAINFO|GIT_SSL_CAPATH|GIT_ASKPASS"
    r"|GIT_CONFIG_(?:GLOBAL|SYSTEM|NOSYSTEM|COUNT|KEY_\d+|VALUE_\d+)"
)
# One language for messages; times that zip can hold, the same in every build; and no bytecode from a build that imports
# what its environment has, for it tells where and when that was.
_FIXED = {"LC_ALL": "C.UTF-8", "SOURCE_DATE_EPOCH": "315532800", "PYTHONDONTWRITEBYTECODE": "1"}
# Of uv's own variables only these pass: they say where packages and interpreters come from and how to get there. All
# others can change what is installed (groups, overrides, dates, forms of packages), and nothing of that is in a key.
# UV_CONFIG_FILE would set the project's own [tool.uv] aside; the user's and the system's uv.toml are read as ever.
_OF_UV = re.compile(
    r"UV_(?:INDEX|INDEX_URL|DEFAULT_INDEX|EXTRA_INDEX_URL|INDEX_STRATEGY|INDEX_[A-Z0-9_]+_(?:USERNAME|PASSWORD)"
    r"|FIND_LINKS|NO_INDEX|OFFLINE|PYTHON_INSTALL_MIRROR|PYPY_INSTALL_MIRROR|PYTHON_DOWNLOADS_JSON_URL"
    r"|HTTP_TIMEOUT|HTTP_CONNECT_TIMEOUT|REQUEST_TIMEOUT|HTTP_RETRIES|NATIVE_TLS|SYSTEM_CERTS|INSECURE_HOST"
    r"|KEYRING_PROVIDER|CREDENTIALS_DIR|GITHUB_TOKEN|LOCK_TIMEOUT|CONCURRENT_(?:DOWNLOADS|BUILDS|INSTALLS))"
)

# uv's words about what a list or a lock says, which no other attempt changes.
_OF_THE_INPUTS = (
    "In `--require-hashes` mode", "Couldn't parse requirement", "Unexpected '", "No solution found when resolving",
    "is not defined in the project's", "Failed to parse `uv.lock`", "uses an unsupported schema version",
    "not compatible with the locked Python requirement", "incompatible with the project's Python requirement",
    "can't be installed because it",  # is for other platforms, or has nothing that may be installed
    "can't be installed because the binary distribution is incompatible",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Uv:
    """The pinned uv with its cache.

    Attributes:
        program: the executable.
        cache: uv's cache folder; on the file system of the environments, so that files can be hard links.
    """

    program: Path
    cache: Path

    def run(self, *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """Run uv and return what it printed.

        Raises:
            IntegrityError: ``payload.hash`` when a file is not what the list says.
            SpecError: ``payload.list``, ``payload.lock`` when uv cannot make sense of these.
            TransportError: ``payload.install`` with uv's own words.
        """
        own = {"UV_CACHE_DIR": str(self.cache), "UV_NO_PROGRESS": "1", "UV_PYTHON_DOWNLOADS": "never", **(env or {})}
        return _run([str(self.program), *map(str, arguments)], own, cwd)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A base interpreter.

    Attributes:
        path: its real file.
        identity: version and build, as it says itself: two builds of one version are two interpreters.
    """

    path: Path
    identity: str


class Programs:
    """uv and the interpreters that one build needs: each is looked for, and asked what it is, once.

    Args:
        work: as for ``find_uv``.
    """

    def __init__(self, work: Path) -> None:
        self._work = work
        self._found: dict[str, Interpreter] = {}

    @cached_property
    def uv(self) -> Uv:
        """As ``find_uv``."""
        return find_uv(self._work)

    def interpreter(self, wanted: str, where: str) -> Interpreter:
        """As ``find_interpreter``."""
        if wanted not in self._found:
            self._found[wanted] = find_interpreter(wanted, self.uv, where)
        return self._found[wanted]


def find_uv(work: Path) -> Uv:
    """The uv of the version that the locks were made for: beside this Python, else on PATH.

    Args:
        work: where environments are made; uv's cache lies in it unless ``UV_CACHE_DIR`` is set.

    Raises:
        SpecError: ``payload.uv``.
    """
    beside = [Path(sys.executable).with_name("uv"), Path(sysconfig.get_path("scripts")) / "uv"]
    found = next((str(p) for p in beside if p.is_file()), None) or shutil.which("uv")
    if found is None:
        raise SpecError("payload.uv", f"there is no uv: pip install uv=={UV_VERSION}, or oci-builder[payload]")
    version = _run([found, "--version"], {}).split()[1:2]
    if version != [UV_VERSION]:
        raise SpecError(
            "payload.uv", f"{found} is version {' '.join(version)}, wanted {UV_VERSION}: pip install uv=={UV_VERSION}",
            where=found, expected=UV_VERSION, actual=" ".join(version),
        )  # fmt: skip
    return Uv(Path(found), Path(os.environ.get("UV_CACHE_DIR") or work / CACHE_NAME).absolute())


def find_interpreter(wanted: str, uv: Uv, where: str) -> Interpreter:
    """The interpreter: ``host`` (the one that runs us, outside its venv), a path, or a version.

    A version that this machine lacks is installed by uv beside its cache, from where uv's own settings say
    (``UV_PYTHON_INSTALL_MIRROR``, ``UV_PYTHON_DOWNLOADS=never`` to forbid it).

    Raises:
        SpecError: ``spec.path`` when there is none, or it does not run.
    """
    if wanted == "host":
        path = Path(getattr(sys, "_base_executable", "") or sys.executable)
    elif "/" in wanted:
        path = Path(wanted).expanduser()
    else:
        path = _by_version(wanted, uv, where)
    path = path.resolve()
    try:
        identity = _run([str(path), "-I", "-c", "import sys; print(sys.version, sys.implementation.cache_tag)"], {})
    except (OSError, TransportError) as error:
        raise SpecError(
            "spec.path", f"{where}: {show(str(path))} is no Python that runs: {error}", where=where
        ) from None
    return Interpreter(path, " ".join(identity.split()))


def _by_version(wanted: str, uv: Uv, where: str) -> Path:
    folder = {"UV_PYTHON_INSTALL_DIR": str(uv.cache / "python")}
    ask = ("python", "find", "--no-project", "--system", wanted)
    with suppress(TransportError):
        return Path(uv.run(*ask, env=folder).strip())
    downloads = os.environ.get("UV_PYTHON_DOWNLOADS") or "manual"
    try:
        uv.run("python", "install", "--no-bin", wanted, env={**folder, "UV_PYTHON_DOWNLOADS": downloads})
        return Path(uv.run(*ask, env=folder).strip())
    except TransportError as error:
        raise SpecError(
            "spec.path", f"{where}: no Python {show(wanted)} on this machine, and uv cannot install it; name its path, "
            f"or set UV_PYTHON_INSTALL_MIRROR ({error.message})", where=where,
        ) from None  # fmt: skip


def probe_links(uv: Uv, work: Path) -> None:
    """Prove that a file of uv's cache can have a second name in the work folder.

    Raises:
        SpecError: ``payload.hardlinks``: uv would copy instead, and say so only in a warning.
    """
    uv.cache.mkdir(parents=True, exist_ok=True)
    one, two = uv.cache / f".probe-{os.getpid()}", work / f".probe-{os.getpid()}"
    try:
        one.write_bytes(b"")
        os.link(one, two)
    except OSError as error:
        raise SpecError(
            "payload.hardlinks",
            f"no hard links from {uv.cache} to {work} ({error.strerror}), and tiers share their files by them: put "
            "UV_CACHE_DIR and --cache on one file system that has them",
            where=str(work),
        ) from None
    finally:
        one.unlink(missing_ok=True)
        two.unlink(missing_ok=True)


def _run(argv: list[str], env: Mapping[str, str], cwd: Path | None = None) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, env={**_callers(), **env}, cwd=cwd, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-1500:]
        said = f"{Path(argv[0]).name} {' '.join(argv[1:3])}: {words}"
        if "Hash mismatch" in words:
            raise IntegrityError("payload.hash", said)
        if any(told in words for told in _OF_THE_INPUTS):
            raise SpecError("payload.lock" if "sync" in argv[1:2] else "payload.list", said)
        raise TransportError("payload.install", said)
    return done.stdout


def _callers() -> dict[str, str]:
    """What of the caller's environment reaches uv, the interpreters and builds."""
    return _FIXED | {
        name: value
        for name, value in os.environ.items()
        if (_OF_UV if name.startswith("UV_") else _OF_SHELL).fullmatch(name)
    }
