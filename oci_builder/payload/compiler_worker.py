"""Stands before a compiler while packages are built: a program of its own, standard library only.

Arguments: the settings file, a kind (``cc``, ``rustc``, ``nvcc``, ``stage``), the real program (for an ``nvcc`` that is
to be looked for: empty), then what the caller said. The settings: ``places`` (folder -> what to call it) and
``patterns`` (regular expression -> the same).

Compilers write the names of the folders they work in into what they make: ``__FILE__`` in messages, line tables, and
nvcc's names for what a file keeps to itself. Build folders have random names, so the same source gives other bytes each
time, and an installed library names a folder of the machine that built it. gcc and clang can be told other names. nvcc
cannot: of its stages, the one that makes up names takes them from the source's real path. So nvcc runs as a copy with a
profile of its own, which leads to stages that are told the other names (cudafe++, cicc and fatbinary).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

_LINE = rb'(?m)^(# \d+ ")'
_NAMED = ("--orig_src_file_name", "--orig_src_path_name")
_STAGES = ("cudafe++", "cicc", "fatbinary")
_FLAGS = {"cc": "-ffile-prefix-map", "rustc": "--remap-path-prefix"}
NOTES = "notes"


def main(settings: str, kind: str, real: str, *said: str) -> NoReturn:
    """Run the real program with the names replaced; it takes this process over."""
    names = known(json.loads(Path(settings).read_bytes()), (os.getcwd(), *said))
    if kind == "nvcc":
        real = real or find_nvcc(Path(settings).parent, os.environ)
        if {"-G", "--device-debug"} & set(said):
            note(Path(settings).parent, "nvcc's device debugging (-G) keeps process numbers: other bytes each time")
        program = str(staged_nvcc(Path(settings), real))
        if program == real:
            os.environ["PATH"] = behind(Path(settings).parent, os.environ)
        # Of a source named from where it lies the line tables hold the folder beside the name, and that as it is.
        run(program, [os.path.abspath(word) if is_source(word) else word for word in said])
    if kind == "stage":
        for word in said:
            if word.endswith(".ii") and os.path.isfile(word):
                rename_lines(Path(word), names)
        run(real, told(said, names))
    # What is found may be ccache, or a script, which look for the next one of their name: it would be us again.
    os.environ["PATH"] = behind(Path(settings).parent, os.environ)
    # The last one that fits wins, and the folders inside come last.
    told_names = [f"{_FLAGS[kind]}={folder}={name}" for folder, name in reversed(names)]
    run(real, [*said, *told_names] if kind == "rustc" else [*told_names, *said])


def note(folder: Path, text: str) -> None:
    """Tell the build something, once however often it is said."""
    place = folder / NOTES
    try:
        if text not in place.read_text().splitlines():
            with place.open("a") as file:
                file.write(f"{text}\n")
    except OSError:
        pass  # no reason for a compiler to fail


def is_source(word: str) -> bool:
    """Is this argument of nvcc a file to compile?"""
    return word.endswith((".cu", ".cpp", ".cc", ".cxx", ".c")) and word[0] not in "-@" and os.path.isfile(word)


def run(program: str, said: Iterable[str]) -> NoReturn:
    """Become the program; status 127 when it cannot be run, as a shell has it."""
    said = list(said)
    try:
        try:
            os.execv(program, [program, *said])
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
        os.execv("/bin/sh", ["/bin/sh", program, *said])  # a script that does not say so, which shells run
    except OSError as error:
        print(f"{program}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def known(settings: Mapping[str, Mapping[str, str]], texts: Iterable[str]) -> list[tuple[str, str]]:
    """(folder, what to call it): the fixed ones and those that the texts hold, the longest first."""
    found = dict(settings["places"])
    for text in texts:
        for pattern, name in settings["patterns"].items():
            found.update((match[0], name) for match in re.finditer(pattern, text))
    return sorted(found.items(), key=lambda item: (-len(item[0]), item[0]))


def renamed(text: str, names: list[tuple[str, str]]) -> str:
    """A path under its other name; itself when it lies in none of the folders."""
    for folder, name in names:
        if text == folder or text.startswith(f"{folder}/"):
            return name + text[len(folder) :]
    return text


def told(said: Iterable[str], names: list[tuple[str, str]]) -> list[str]:
    """A stage's arguments: the names that it writes down are replaced, the files that it opens are not."""
    out: list[str] = []
    for word in said:
        if out and out[-1] in _NAMED:
            out.append(renamed(word, names))
        elif word.startswith("--ident="):
            out.append("--ident=" + renamed(word[len("--ident=") :], names))
        else:
            out.append(word)
    return out


def rename_lines(file: Path, names: list[tuple[str, str]]) -> None:
    """Replace the names that a preprocessed source gives for where its lines come from."""
    before = after = file.read_bytes()
    for folder, name in names:
        after = re.sub(_LINE + re.escape(os.fsencode(folder)) + rb'(?=[/"])', rb"\g<1>" + os.fsencode(name), after)
    if after != before:
        file.write_bytes(after)


def find_nvcc(own: Path, environ: Mapping[str, str]) -> str:
    """The real nvcc: that of ``CUDA_HOME`` or ``CUDA_PATH``, else on ``PATH`` behind our folder."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        found = shutil.which("nvcc", path=os.path.join(environ[name], "bin")) if environ.get(name) else None
        if found:
            return found
    return shutil.which("nvcc", path=behind(own, environ)) or "nvcc"


def behind(own: Path, environ: Mapping[str, str]) -> str:
    """The search path without our folder."""
    folders = environ.get("PATH", "").split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if folder and Path(folder) != own)


def staged_nvcc(settings: Path, real: str) -> Path:
    """A copy of nvcc whose stages are ours, made once; the real one where it is not laid out as we know it."""
    home = home_of(real, settings.parent)
    programs = {"cudafe++": home / "cudafe++", "cicc": home.parent / "nvvm/bin/cicc", "fatbinary": home / "fatbinary"}
    if not all(path.is_file() for path in (home / "nvcc.profile", *programs.values())):
        return Path(real)
    place = settings.parent / f"nvcc-{hashlib.sha256(os.fsencode(home)).hexdigest()[:12]}"
    if not place.is_dir():
        fresh = Path(tempfile.mkdtemp(dir=settings.parent))
        shutil.copy(home / "nvcc", fresh / "nvcc")
        # It looks for what a link needs (crt/link.stub) beside itself.
        for name in set(os.listdir(home)) - {"nvcc", "nvcc.profile", *_STAGES}:
            (fresh / name).symlink_to(home / name)
        profile = (home / "nvcc.profile").read_text().replace("$(_HERE_)", str(home))
        (fresh / "nvcc.profile").write_text(f"{profile}\nCICC_PATH = {place}\nPATH += {place}:\n")
        for name in _STAGES:
            write_shim(fresh / name, [sys.executable, "-IS", __file__, str(settings), "stage", str(programs[name])])
        try:
            fresh.rename(place)
        except OSError:  # another one was faster
            shutil.rmtree(fresh)
    return place / "nvcc"


def home_of(real: str, own: Path) -> Path:
    """The folder of nvcc itself: a system may have a link or a script where it is looked for."""
    home = Path(os.path.realpath(real)).parent
    if not (home / "nvcc.profile").is_file():
        asked = [real, "--dryrun", "-c", "-x", "cu", os.devnull]
        around = {**os.environ, "PATH": behind(own, os.environ)}
        said = subprocess.run(asked, env=around, capture_output=True, text=True, errors="replace", check=False).stderr
        found = re.search(r"^#\$ _HERE_=(.+)$", said, re.MULTILINE)
        home = Path(found[1]) if found else home
    return home


def write_shim(path: Path, words: Iterable[str]) -> None:
    """A program that runs these words with its own arguments behind them."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)


if __name__ == "__main__":
    arguments: Any = sys.argv[1:]
    main(*arguments)
