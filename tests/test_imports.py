"""C12-10: no module imports against the direction, and each third-party package has its one place.

The rules are docs/architecture.md's; the imports are read from the syntax tree, those inside functions too.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("oci_builder", "chroot_exec")

# Folder -> folders below it. A folder may always import itself and the package's root (its version).
BELOW = {
    "model": set(),
    "wire": {"model"},
    "store": {"model", "wire"},
    "rootfs": {"model", "wire"},
    "judge": {"model", "wire", "rootfs"},
    "transports": {"model", "wire", "store", "rootfs", "judge"},
    "payload": {"model", "wire", "store", "rootfs", "judge", "transports"},
    "release": {"model", "wire", "store", "rootfs", "judge", "transports", "payload"},
    "execution": {"model", "wire", "store", "rootfs", "judge", "transports", "release"},
}  # fmt: skip
FOLDERS = set(BELOW)
TOP = {"cli", "engines"}
# Helpers of several verbs that are no verb themselves.
SHARED = {"progress"}

# Package -> the place below oci_builder/ that alone imports it (a folder: any file in it).
PLACES = {
    "pydantic": "model/", "pydantic_core": "model/", "click": "cli/", "rich": "progress.py",
    "isal": "wire/compress/codecs.py", "zstandard": "wire/compress/codecs.py", "deflate": "wire/compress/codecs.py",
    "oras": "transports/registry.py", "requests": "transports/registry_http.py",
    "urllib3": "transports/registry_http.py",
    "docker": "transports/daemon.py", "packageurl": "release/sbom.py",
    "cryptography": "release/signing.py", "huggingface_hub": "release/hub.py", "cyclonedx": "release/sbom.py",
    "modal": "engines/modal_app.py", "elftools": "payload/elf.py",
}  # fmt: skip


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports, with the line; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Shipped programs are packages of their own, which may be moved as a whole.
            if node.level and "layers" in path.parts:
                continue
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def room(dotted: str) -> str:
    """The folder or verb below oci_builder that a dotted name or a file's path leads to; "" is the root itself."""
    parts = dotted.split(".")
    if parts[0] != "oci_builder" or len(parts) == 1:
        return ""
    found = ROOT / "oci_builder" / parts[1]
    return parts[1] if found.is_dir() or found.with_suffix(".py").exists() else ""


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "oci_builder").parts[0].removesuffix(".py")


def allowed(own: str, other: str) -> bool:
    if other in ("", own):
        return True
    if own in FOLDERS:
        return other in BELOW[own]
    if own == "__main__":
        return other == "cli"
    if own in TOP:
        return other != "cli"
    # A verb: folders and helpers, never another verb.
    return other in FOLDERS | SHARED


def test_imports_follow_the_direction() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {room_of(path)} imports {name}"
        for path in python_files("oci_builder")
        if room_of(path) != "__init__"
        for name, line in imports(path)
        if not allowed(room_of(path), room(name))
    ]
    assert wrong == []


def test_the_runner_imports_only_itself_and_the_standard_library() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python_files("chroot_exec")
        for name, line in imports(path)
        if (top := name.split(".")[0]) != "chroot_exec" and top not in sys.stdlib_module_names
    ]
    assert wrong == []


def test_shipped_files_import_only_the_standard_library_and_their_tier() -> None:
    """What stands in layers/files/ runs on hosts that have nothing of ours."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python_files("layers/files")
        for name, line in imports(path)
        if name.split(".")[0] in {*OURS, *PLACES}
    ]
    assert wrong == []


def test_each_package_has_its_one_place() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path in python_files("oci_builder"):
        for name, _ in imports(path):
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top not in OURS:
                found[top].add(str(path.relative_to(ROOT / "oci_builder")))
    unknown = {package: sorted(files) for package, files in found.items() if package not in PLACES}
    assert unknown == {}, "name their place in PLACES, or do without"
    elsewhere = {
        package: sorted(f for f in files if not f.startswith(PLACES[package])) for package, files in found.items()
    }
    assert {package: files for package, files in elsewhere.items() if files} == {}


def file_of(dotted: str) -> Path | None:
    """The file of ours that a dotted name leads to; a name within a package leads to its ``__init__``."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:count])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
    return None


def test_no_file_needs_a_file_that_needs_it() -> None:
    """Nor for a type alone: what two files mean by a type stands in a third."""
    files = [path for package in (*OURS, "bench") for path in python_files(package)]
    needs = {path: {file_of(name) for name, _ in imports(path)} - {None, path} for path in files}
    assert set(TopologicalSorter(needs).static_order()) >= set(files)  # CycleError names the files


@pytest.mark.parametrize(
    ("own", "other", "good"),
    [
        ("model", "wire", False), ("wire", "model", True), ("wire", "store", False), ("rootfs", "store", False),
        ("transports", "build", False), ("build", "verify", False), ("build", "release", True),
        ("cli", "build", True), ("engines", "cli", False), ("verify", "progress", True),
        ("__main__", "cli", True), ("__main__", "build", False),
    ],
)  # fmt: skip
def test_the_rule_itself(own: str, other: str, good: bool) -> None:
    assert allowed(own, other) is good


def test_imports_inside_functions_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text("def f():\n    from oci_builder.build import build\n    import modal\n")
    assert list(imports(file)) == [("oci_builder.build.build", 2), ("modal", 3)]
    assert room("oci_builder.build.build") == "build"


def test_files_and_functions_stay_small() -> None:
    """Architecture, Style: a file over 400 lines or a function over 40 asks to be split."""
    long = []
    for path in (p for package in (*OURS, "layers", "bench", "tests") for p in python_files(package)):
        text = path.read_text()
        if (lines := text.count("\n")) > 400:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                if (size := (node.end_lineno or 0) - first.lineno + 1) > 40:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {size} lines")
    assert long == []
