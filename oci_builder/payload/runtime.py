"""The whole prefix of a runtime: environments, the interpreter they need, the source; relocated, compiled, audited.

Environments are made apart, in a cache; here they come together as they will lie under the prefix, by hard links. Tiers
that stand on disk already (``path``) are somebody else's work and stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oci_builder.model.errors import CheckFailed, SpecError, TransportError, disk_error
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.jsontext import dump_json
from oci_builder.model.spec import HostBase, LockTier, RequirementsTier, Spec
from oci_builder.payload.bytecode import WORKER, compile_tree
from oci_builder.payload.cuda import cuda_texts
from oci_builder.payload.licences import collect_licences, python_texts
from oci_builder.payload.overlay import export_source, fix_packages, overlay_identity, resolve_commit
from oci_builder.payload.partial import making, put
from oci_builder.payload.python import original_names, stage_python
from oci_builder.payload.relocate import apply_relocation, plan_relocation, prefixes_of
from oci_builder.payload.relocate_audit import AuditOptions, audit
from oci_builder.payload.uv import Interpreter, Programs

_FORMAT = 5
_RECORD = "runtime.json"
_FIX = ("path", "sha256", "patched", "why")
_MARKER_SCHEMA = "oci-builder/runtime/1"
# Where a folder of the build machine may stand, and why that does no harm.
_ALLOWED = (
    ("*/dist-info/METADATA", "documentation"),
    ("python/bin/python3*", "the interpreter's own prefix, used only when no standard library lies beside it"),
    ("python/lib/libpython3*", "the interpreter's own prefix, used only when no standard library lies beside it"),
)
_ASK = "import json, os, sys; print(json.dumps([os.path.realpath(p) for p in (sys.prefix, sys.base_prefix)]))"


@dataclass(frozen=True, slots=True)
class Runtime:
    """What goes under the prefix.

    Attributes:
        tiers: name -> folder that lands in ``envs/<name>``.
        trees: path below the prefix -> folder: ``python``, ``source``.
        files: path below the prefix -> content: the marker ``runtime.json`` and the tiers' inventories.
        made: at least one tier is uv's work, not somebody's staged tree.
        kept: names of the folders of the cache that it was made of.
    """

    tiers: Mapping[str, Path]
    trees: Mapping[str, Path] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    made: bool = False
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What one assembly is made of.

    Attributes:
        shipped: the copy of ``python`` that goes along, if one must.
    """

    tiers: Mapping[str, Path]
    python: Interpreter
    shipped: Path | None
    project: Path | None
    commit: str
    overlay: Path | None


def assemble_runtime(
    spec: Spec,
    folder: Path,
    work: Path,
    tiers: Mapping[str, Path],
    jobs: int,
    emit: Emit = silent,
    programs: Programs | None = None,
) -> Runtime:
    """Bring the tiers together. Idempotent: the same inputs give the folder that stands there.

    Args:
        folder: relative paths of the spec are relative to it.
        work: where environments are made.
        tiers: name -> folder, as ``realize_tiers`` gives them.
        programs: what the caller asked already.

    Raises:
        SpecError: ``payload.python`` (tiers of two interpreters), ``payload.overlay`` (the source is another one).
        CheckFailed: ``payload.audit`` when something still names the place where it was made, ``payload.python`` when
            an environment does not find the shipped interpreter.
        TransportError: ``payload.*``, ``io.*``.
    """
    inputs = _inputs(spec, folder, work, tiers, emit, programs or Programs(work))
    if inputs is None:
        return Runtime(dict(tiers), files=_marker(spec) if spec.release is not None else {})
    place = work / f"runtime-{_key(spec, inputs)}"
    if not (place / _RECORD).is_file():
        emit(Event("start", "runtime", unit="items"))
        try:
            _make(spec, inputs, work, place, jobs, emit)
        except OSError as error:
            raise disk_error(error, "assembling the runtime") from None
        emit(Event("done", "runtime", unit="items"))
    made = {name: place / "envs" / name for name in inputs.tiers}
    trees = {name: place / name for name in ("python", "source") if (place / name).is_dir()}
    files = {**_marker(spec, inputs.commit), **_inventories(inputs.tiers, place)}
    kept = [place, *(env.parent for env in inputs.tiers.values()), *([inputs.shipped] if inputs.shipped else [])]
    whole = {name: made.get(name, path) for name, path in tiers.items()}
    return Runtime(whole, trees, files, made=True, kept=tuple(path.name for path in kept))


def add_licences(runtime: Runtime, cuda: Path | None) -> Runtime:
    """The runtime with the licence texts of what it ships. A runtime of staged trees alone is left as it is.

    Args:
        cuda: the toolkit that the portable archive brings.

    Raises:
        TransportError: ``io.*``.
    """
    if not runtime.made:
        return runtime
    python = runtime.trees.get("python")
    extra = {**(python_texts(python) if python else {}), **(cuda_texts(cuda) if cuda else {})}
    return replace(runtime, files={**runtime.files, **collect_licences(runtime.tiers, extra)})


def _inputs(
    spec: Spec, folder: Path, work: Path, tiers: Mapping[str, Path], emit: Emit, programs: Programs
) -> _Inputs | None:
    uv_tiers = {name: tier for name, tier in spec.tiers.items() if isinstance(tier, RequirementsTier | LockTier)}
    if not uv_tiers:
        return None
    # A host base has the interpreter that runs us at its own path; every other must come along.
    found = {
        name: (
            programs.interpreter(tier.python, f"tiers.{name}.python"),
            not (isinstance(spec.base, HostBase) and tier.python == "host"),
        )
        for name, tier in uv_tiers.items()
    }
    if len(set(found.values())) > 1:
        places = ", ".join(f"{name}: {python.path}" for name, (python, _) in sorted(found.items()))
        raise SpecError("payload.python", f"all tiers of a runtime need one interpreter ({places})", where="tiers")
    python, shipped = next(iter(found.values()))
    project = _project(uv_tiers)
    overlay = folder / spec.files / "files/source_overlay" if spec.files is not None else None
    return _Inputs(
        {name: tiers[name] for name in uv_tiers}, python, stage_python(python, work, emit) if shipped else None,
        None if project is None else folder / project.project,
        resolve_commit(folder / project.project, project.commit or "HEAD") if project else "",
        overlay if overlay is not None and (overlay / "overlay.json").is_file() else None,
    )  # fmt: skip


def _project(tiers: Mapping[str, RequirementsTier | LockTier]) -> LockTier | None:
    projects = [tier for tier in tiers.values() if isinstance(tier, LockTier)]
    if len({(tier.project, tier.commit) for tier in projects}) > 1:
        raise SpecError("payload.project", "tiers of two projects, or of two commits of one", where="tiers")
    return projects[0] if projects else None


def _key(spec: Spec, inputs: _Inputs) -> str:
    parts: list[Any] = [
        _FORMAT, spec.prefix, sorted((name, path.parent.name) for name, path in inputs.tiers.items()),
        str(inputs.python.path), inputs.python.identity, inputs.shipped.name if inputs.shipped else None, inputs.commit,
        overlay_identity(inputs.overlay), hashlib.sha256(WORKER.read_bytes()).hexdigest(),
    ]  # fmt: skip
    return hashlib.sha256(dump_json(parts)).hexdigest()[:20]


def _make(spec: Spec, inputs: _Inputs, work: Path, place: Path, jobs: int, emit: Emit) -> None:
    with making(place) as root:
        root.mkdir()
        for name, env in inputs.tiers.items():
            link_tree(env, root / "envs" / name)
        python = inputs.python.path
        if inputs.shipped is not None:
            link_tree(inputs.shipped, root / "python")
        if inputs.project is not None:
            export_source(inputs.project, inputs.commit, root / "source", inputs.overlay)
        fixes = _fix(inputs, root, emit)
        _relocate(spec, inputs, work, root, jobs, fixes, emit)
        if inputs.shipped is not None:
            for name in inputs.tiers:
                _prove_home(root, name)
        build = hashlib.sha256(inputs.python.identity.encode()).hexdigest()[:16]
        compile_tree(root, python, work / f"bytecode-{build}", jobs)
        _plain_folders(root)
        (root / _RECORD).write_bytes(dump_json({"format": _FORMAT, "prefix": spec.prefix, "fixes": fixes}))
        put(root, place, _RECORD)


def _fix(inputs: _Inputs, root: Path, emit: Emit) -> dict[str, list[dict[str, Any]]]:
    """What the overlay mends in the packages of each tier."""
    fixes: dict[str, list[dict[str, Any]]] = {}
    if inputs.overlay is None:
        return fixes
    for name in sorted(inputs.tiers):
        done = fix_packages(root / "envs" / name, inputs.overlay)
        fixes[name] = done["fixed"]
        for other in done["other"]:
            emit(Event("note", "runtime", message=f"{name}: the overlay has no fixes for {other}"))
    return fixes


def _relocate(
    spec: Spec, inputs: _Inputs, work: Path, root: Path, jobs: int, fixes: Mapping[str, Sequence[Any]], emit: Emit
) -> None:
    built = {str(env): f"envs/{name}" for name, env in inputs.tiers.items()}
    if inputs.shipped:
        names = original_names(inputs.python.path)
        built |= {name: f"python/{below}".rstrip("/") for name, below in names.items()}
    prefixes = prefixes_of(root, spec.prefix, built)
    changes = plan_relocation(root, prefixes)
    edited = [f"envs/{tier}/{fix['path']}" for tier, found in fixes.items() for fix in found]
    apply_relocation(root, changes, map(os.fsencode, edited))
    emit(Event("note", "runtime", message=f"{len(changes)} files and links relocated"))
    external = () if inputs.shipped else (str(inputs.python.path), f"{inputs.python.path.parent}/python*")
    options = AuditOptions((str(root), str(work), *built), external, _ALLOWED, jobs)
    wrong = [finding for finding in audit(root, options) if finding.severity == "error"]
    wrong = [finding for finding in wrong if not finding.where.startswith("source/")]
    if wrong:
        first = "; ".join(f"{finding.where}: {finding.actual or finding.code}" for finding in wrong[:5])
        raise CheckFailed(
            "payload.audit", f"{len(wrong)} files hang on the place where they were made: {first}", where=wrong[0].where
        )


def _prove_home(root: Path, tier: str) -> None:
    """An environment at a place it was never told of runs off the interpreter beside it, and not off this machine's.

    Raises:
        CheckFailed: ``payload.python``.
    """
    python, home = root / "envs" / tier / "bin/python", os.path.realpath(root)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_", "VIRTUAL_"))}
    done = subprocess.run(
        [str(python), "-I", "-B", "-c", _ASK], capture_output=True, text=True, env=clean, cwd="/", check=False
    )
    wanted = [f"{home}/envs/{tier}", f"{home}/python"]
    if done.returncode or json.loads(done.stdout) != wanted:
        said = done.stderr.strip()[-300:] or f"it runs off {done.stdout.strip()}"
        raise CheckFailed(
            "payload.python", f"tiers.{tier}: its interpreter does not follow a runtime that moves: {said}; take "
            "another Python", where=f"tiers.{tier}.python",
        )  # fmt: skip


def link_tree(source: Path, target: Path) -> None:
    """The same tree under another name: folders anew, files as hard links, links as they are.

    Raises:
        TransportError: ``io.*``.
    """
    try:
        for parent, folders, names in os.walk(source):
            here = target / os.path.relpath(parent, source)
            here.mkdir(parents=True, exist_ok=True)
            for name in [*names, *(f for f in folders if os.path.islink(os.path.join(parent, f)))]:
                path = os.path.join(parent, name)
                if os.path.islink(path):
                    os.symlink(os.readlink(path), here / name)
                else:
                    os.link(path, here / name)
    except OSError as error:
        raise disk_error(error, f"linking {source}") from None


def _plain_folders(root: Path) -> None:
    """Folders, links and new files were made today, under this umask."""
    for parent, folders, names in os.walk(root, topdown=False):
        for name in [*names, *folders]:
            path = os.path.join(parent, name)
            if os.path.islink(path):
                os.utime(path, (0, 0), follow_symlinks=False)
        os.chmod(parent, 0o755)
        os.utime(parent, (0, 0))


def _marker(spec: Spec, commit: str = "") -> dict[str, bytes]:
    """What an unpacked prefix is; ``repack`` believes no archive without it."""
    release = {} if spec.release is None else {"release": spec.release}
    about = {"schema": _MARKER_SCHEMA, "name": spec.name, "tag": spec.tag, "prefix": spec.prefix, **release}
    return {_RECORD: dump_json({**about, "tiers": list(spec.tiers), "source": commit or None}) + b"\n"}


def _inventories(tiers: Mapping[str, Path], place: Path) -> dict[str, bytes]:
    fixes = _read_json(place / _RECORD, place).get("fixes", {})
    return dict(_inventory(name, env, fixes.get(name, ())) for name, env in sorted(tiers.items()))


def _inventory(name: str, env: Path, fixes: Sequence[Mapping[str, Any]]) -> tuple[str, bytes]:
    """As it lies beside the environment; a package that is not as its file brought it says so (``fixes``)."""
    path = env.parent / "inventory.json"
    value = _read_json(path, path.parent)
    for package in value["packages"]:
        own = [{k: fix[k] for k in _FIX} for fix in fixes if fix["package"] == package["name"]]
        package |= {"fixes": own} if own else {}
    return f"inventory-{name}.json", (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _read_json(path: Path, made: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TransportError("payload.inventory", f"{path}: {error}; remove {made}", where=str(path)) from None
