"""A project's source from its repository: one commit with its submodules, fetched by git, kept, proved, checked out.

Each repository has a bare one of ours in the cache, so that what arrived once is not asked for again: a build with
everything there needs no network, and one that was interrupted goes on with the repositories that are missing. The
commit's id covers every byte: git checks each object against its name when it arrives, and before it is checked out.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from oci_builder.model.errors import OciBuilderError, PolicyError, SpecError, TransportError, disk_error, show
from oci_builder.model.events import Emit, Event
from oci_builder.model.redact import redact
from oci_builder.model.spec import GitTier, LockTier, Spec
from oci_builder.payload.checkout import FOREIGN, SETTINGS_WORDS, borrow, check_commit, git, submodules
from oci_builder.payload.partial import making
from oci_builder.store.locks import alone
from oci_builder.store.removal import remove_folder

FOLDER = "sources"
ATTEMPTS, PAUSE_SECONDS = 3, 2.0
# A server that says nothing for a minute is gone; objects are checked when they come; nobody is asked for a password.
_OPTIONS = (
    "transfer.fsckObjects=true", "http.lowSpeedLimit=1000", "http.lowSpeedTime=60", "gc.auto=0", "core.askPass=",
    "fetch.recurseSubmodules=false", "fetch.writeCommitGraph=false",
)  # fmt: skip
_QUIET = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
_DEEPEST = 8
# What a server says that gives no commit by its id alone, or none of a shallow history.
_BY_NAME_ONLY = ("unadvertised object", "not our ref", "shallow capabilities", "find remote ref", "no such remote ref")
_NOT_LET_IN = ("Authentication failed", "could not read Username", "could not read Password", "error: 40")


@dataclass(frozen=True, slots=True)
class _Remote:
    """Where a repository is.

    Attributes:
        url: as a spec or a commit names it; shown.
        scheme: of where git's settings lead it; the only one that git may use.
    """

    url: str
    scheme: str


def fetch_sources(spec: Spec, work: Path, emit: Emit) -> Spec:
    """The spec with a checkout in place of each repository. Idempotent; without network once everything is there.

    Args:
        work: where environments are made.

    Raises:
        as ``fetch_project``.
    """
    tiers = {
        name: _local(tier, fetch_project(tier.git, tier.commit, work, f"tiers.{name}", emit))
        if isinstance(tier, GitTier) else tier
        for name, tier in spec.tiers.items()
    }  # fmt: skip
    return spec.model_copy(update={"tiers": tiers})


def _local(tier: GitTier, checkout: Path) -> LockTier:
    return LockTier(
        project=str(checkout / tier.folder), commit=tier.commit, lock=tier.lock, extras=tier.extras, python=tier.python,
        omit=tier.omit, build_env=tier.build_env,
    )  # fmt: skip


def fetch_project(url: str, commit: str, work: Path, where: str, emit: Emit) -> Path:
    """A checkout of a commit, its submodules at the commits that it records included.

    Args:
        url: a ``https://`` or ``file://`` URL without credentials (git's own credential helpers are asked for those).
        commit: its whole id.
        work: the checkout and the repositories are kept in a folder below it.
        where: the spec's field to blame.

    Raises:
        SpecError: ``payload.commit``: the repository has no such commit.
        IntegrityError, TransportError: ``auth``, ``payload.source`` with git's own words, ``io.*``.
        PolicyError: ``payload.submodule``: a submodule lies where this source must not lead.
    """
    sources = work / FOLDER
    place = sources / f"{_name(url)}-{commit[:12]}-{_short(url + ' ' + commit)}"
    try:
        sources.mkdir(parents=True, exist_ok=True)
        with alone(sources / f".{place.name}.lock"):
            if not _stands(place, commit, where):
                emit(Event("start", f"source {where}", unit="items"))
                _make(place, _Remote(url, urlsplit(url).scheme), commit, where, emit)
                emit(Event("done", f"source {where}", unit="items"))
    except OSError as error:
        raise disk_error(error, f"fetching the source of {where}") from None
    return place


def _stands(place: Path, commit: str, where: str) -> bool:
    if not place.is_dir():
        return False
    try:
        check_commit(place, commit, where)
        return True
    except OciBuilderError:
        remove_folder(place)  # somebody worked in it; the repositories are still there
        return False


def _make(place: Path, remote: _Remote, commit: str, where: str, emit: Emit) -> None:
    with making(place) as staging:
        _check_out(place.parent, remote, commit, staging, where, emit, _DEEPEST)
        staging.rename(place)


def _check_out(
    sources: Path, remote: _Remote, commit: str, target: Path, where: str, emit: Emit, depth: int
) -> None:
    borrow(_repository(sources, remote, commit, where, emit), commit, target, where)
    inside = list(submodules(target, commit, where))
    urls = _urls(target, remote, where) if inside else {}
    for path, inner in inside:
        if path not in urls:
            raise PolicyError("payload.submodule", f"{where}: no .gitmodules says where {show(path)} is", where=where)
        if depth == 0 or (target / path).is_symlink():
            raise PolicyError("payload.submodule", f"{where}: submodules in circles at {show(path)}", where=where)
        _check_out(sources, urls[path], inner, target / path, where, emit, depth - 1)


# ---- repositories


def _repository(sources: Path, remote: _Remote, commit: str, where: str, emit: Emit) -> Path:
    """The bare repository of a URL, with the commit and everything in it, each object checked against its name."""
    url = remote.url
    bare = sources / f"{_name(url)}-{_short(url)}.git"
    with alone(sources / f".{bare.name}.lock"):
        if not _is_whole(bare, commit):
            _begin(bare, commit, where)
            emit(Event("note", f"source {where}", message=f"fetching {url} at {commit}"))
            _fetch(bare, remote, commit, where)
            if not _is_whole(bare, commit):
                remove_folder(bare)
                raise TransportError(
                    "payload.source", f"{where}: {url}: what came for {commit} is damaged; run again", where=where
                )
    return bare


def _is_whole(bare: Path, commit: str) -> bool:
    if not (bare / "HEAD").is_file():
        return False
    there = _run(bare, "rev-parse", "--verify", "--quiet", f"refs/pins/{commit}^{{commit}}")
    if there.returncode or there.stdout.strip() != commit:
        return False
    return _run(bare, "fsck", "--no-dangling", "--no-reflogs", "--no-progress", f"refs/pins/{commit}").returncode == 0


def _begin(bare: Path, commit: str, where: str) -> None:
    if (bare / "HEAD").is_file() and _run(bare, "fsck", "--no-dangling", "--no-progress").returncode:
        remove_folder(bare)  # nothing of it can be believed
    kind = "sha1" if len(commit) == 40 else "sha256"
    git(bare.parent, "init", "--quiet", "--bare", "--template=", f"--object-format={kind}", bare.name, where=where)
    for left in (bare / "objects/pack").glob("tmp_*"):
        left.unlink(missing_ok=True)


def _fetch(bare: Path, remote: _Remote, commit: str, where: str) -> None:
    url, said = remote.url, ""
    for attempt in range(ATTEMPTS):
        said = _ask(bare, remote, ("--depth=1",), f"+{commit}:refs/pins/{commit}")
        if said and any(word in said for word in _BY_NAME_ONLY):
            said = _ask(bare, remote, (), "+refs/heads/*:refs/branches/*", "+refs/tags/*:refs/tags/*")
            if not said:
                _pin(bare, url, commit, where)
        if not said:
            return
        _give_up(said, url, where)
        time.sleep(PAUSE_SECONDS * attempt)
    raise TransportError("payload.source", f"{where}: cannot fetch {url}: {said}", where=where)


def _pin(bare: Path, url: str, commit: str, where: str) -> None:
    if _run(bare, "update-ref", f"refs/pins/{commit}", f"{commit}^{{commit}}").returncode:
        raise SpecError(
            "payload.commit", f"{where}: {url} has no commit {commit} on any branch or tag", where=f"{where}.commit",
            expected=commit,
        )  # fmt: skip


def _ask(bare: Path, remote: _Remote, options: tuple[str, ...], *wanted: str) -> str:
    """What git says when it could not; empty when it could."""
    settings = [word for option in _OPTIONS for word in ("-c", option)]
    words = ("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", *options, "--", remote.url, *wanted)
    done = _run(bare, *settings, *words, GIT_ALLOW_PROTOCOL=remote.scheme)
    return redact(done.stderr.strip()[-800:]) or "git said nothing" if done.returncode else ""


def _give_up(said: str, url: str, where: str) -> None:
    """What another attempt does not change."""
    if any(word in said for word in _NOT_LET_IN):
        raise TransportError(
            "auth", f"{where}: {url} lets nobody in, or is not there: {said}; give git a credential helper for it",
            where=where,
        )  # fmt: skip
    if "No space left" in said or "Disk quota" in said:
        raise TransportError("io.space", f"{where}: {said}", where=where)
    if "transport '" in said and "not allowed" in said:
        raise PolicyError("payload.source", f"{where}: {url}: git's settings lead elsewhere: {said}", where=where)


def _run(place: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in (*FOREIGN, "SSH_ASKPASS")}
    try:
        return subprocess.run(
            ["git", *SETTINGS_WORDS, "-C", str(place), *words], env={**kept, **_QUIET, **env}, capture_output=True,
            stdin=subprocess.DEVNULL, text=True, errors="replace", check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise SpecError("payload.source", "there is no git, which fetches sources: install it") from None


# ---- submodules


def _urls(target: Path, parent: _Remote, where: str) -> dict[str, _Remote]:
    """Path of a submodule -> where it is, as the commit's own .gitmodules says."""
    words = ("config", "--null", "--blob", "HEAD:.gitmodules", "--get-regexp", r"^submodule\..*\.(path|url)$")
    listed = _run(target, *words)
    found: dict[str, dict[str, str]] = {}
    for entry in listed.stdout.split("\0"):
        key, _, value = entry.partition("\n")
        name, _, field = key.rpartition(".")
        found.setdefault(name, {})[field] = value
    return {
        about["path"]: _submodule(about["url"], parent, about["path"], where)
        for about in found.values()
        if {"path", "url"} <= about.keys()
    }


def _submodule(named: str, parent: _Remote, path: str, where: str) -> _Remote:
    if named.startswith(("./", "../")):
        # scp's form too, which the user's settings may lead elsewhere: git@example.org:place
        head, mark, path_there = parent.url.partition("://" if "://" in parent.url else ":")
        named = head + mark + posixpath.normpath(posixpath.join(path_there, named))
    if named.startswith("/"):
        named = f"file://{named}"
    # The user's own settings may have a way that needs no key (url.<base>.insteadOf).
    led = "" if named.startswith("-") else _run(Path("/"), "ls-remote", "--get-url", named).stdout.strip()
    scheme = urlsplit(led).scheme
    if scheme not in ("https", parent.scheme):
        raise PolicyError(
            "payload.submodule", f"{where}: the submodule {show(path)} is at {show(redact(named))}, and from a "
            f"{parent.scheme} source only https leads on; git's setting url.<base>.insteadOf can name another way",
            where=where,
        )  # fmt: skip
    return _Remote(named, scheme)


# ---- names, locks


def _name(url: str) -> str:
    last = urlsplit(url).path.rstrip("/").rpartition("/")[2].removesuffix(".git")
    return "".join(c if (c.isascii() and c.isalnum()) or c in "-_" else "_" for c in last)[:40] or "source"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
