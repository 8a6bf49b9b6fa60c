"""Puts the host's GPU files into a sandbox, and proves that programs in it get those and no others.

Before the sandbox is entered the files are placed (``place``): /usr/local/nvidia is covered with a folder of ours, so
that nothing of the image is in the way. Afterwards (``activate``) the image's own ldconfig makes a new loader cache,
with as few rights as a check has, and the result is checked.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from chroot_exec import cudaprobe, drivers, elf, process, syscalls
from chroot_exec.environment import append, prepend
from chroot_exec.errors import RunnerError
from chroot_exec.gpu import Injection
from chroot_exec.identity import Identity, become
from chroot_exec.mounts import FileSystem
from chroot_exec.protocol import Bind
from chroot_exec.resolve import Root, fd_path

HOME = "/usr/local/nvidia"
LIBRARIES = HOME + "/lib64"
TOOLS = HOME + "/bin"
_WORK = "/run/chroot-exec"
_CACHE = "/etc/ld.so.cache"
_LDCONFIG_SECONDS = 120.0
_IMAGE_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/local/nvidia/lib",
    "/usr/local/nvidia/lib64", "/usr/local/cuda/compat",
)  # fmt: skip
_DRIVER_FILE = re.compile(r"(lib(?:cuda|cudadebugger|nvcuvid|nvoptix|nvidia-[a-z0-9-]+))\.so\.(\d{3,4}(?:\.\d+)*)\Z")


def place(files: FileSystem, injection: Injection) -> None:
    """Mount the driver's files, make the links, and write the loader's configuration.

    Raises:
        RunnerError: ``sandbox.bind``, ``sandbox.target``.
    """
    cudaprobe.preload()
    for text in injection.notes:
        files.facts.note(text)
    for text in strays(files.root, injection.driver):
        files.facts.note(text)
    files.scratch(HOME, 0o755, 0)
    for folder, paths in ((LIBRARIES, injection.libraries), (TOOLS, injection.tools)):
        os.close(files.root.directory(folder))
        for path in paths:
            files.bind(Bind(path, f"{folder}/{os.path.basename(path)}"))
    for path in injection.libraries:
        _library_links(files, path, f"{LIBRARIES}/{os.path.basename(path)}", for_linkers=True)
    for source, target in injection.files:
        files.bind(Bind(source, target))
        if ".so." in target:
            _library_links(files, source, target, for_linkers=False)
    for link, target in injection.links:
        _link(files, link, target)
    if files.read_only:
        os.close(files.root.open(_CACHE, "file"))
    _write_configuration(files.root, injection)


def strays(root: Root, driver: str) -> list[str]:
    """Notes about driver libraries of another version that the image itself holds, one a folder."""
    notes = []
    for folder in _library_folders(root):
        found = [name for name in root.listdir(folder) if _foreign(name, driver)]
        if found:
            shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            notes.append(f"the image holds {shown} in {folder}; the driver is {driver}, whose own libraries are used")
    return notes


def _foreign(name: str, driver: str) -> bool:
    match = _DRIVER_FILE.match(name)
    return match is not None and match.group(2) != driver


def _library_folders(root: Root) -> list[str]:
    """Folders where images have driver libraries, each once: many are links to one another."""
    by_identity: dict[tuple[int, int], str] = {}
    for folder in (*_IMAGE_FOLDERS, *(f"/usr/local/{n}/compat" for n in root.listdir("/usr/local"))):
        try:
            fd = root.open(folder)
        except RunnerError:
            continue
        info = os.fstat(fd)
        os.close(fd)
        by_identity.setdefault((info.st_dev, info.st_ino), folder)
    return list(by_identity.values())


def compat_folder(root: Root) -> tuple[str, str]:
    """The image's forward-compatibility folder and its libcuda's version; empty when it has none."""
    folders = ["/usr/local/cuda/compat", *(f"/usr/local/{n}/compat" for n in root.listdir("/usr/local"))]
    for folder in folders:
        for name in root.listdir(folder):
            match = _DRIVER_FILE.match(name)
            if match and match.group(1) == "libcuda":
                return folder, match.group(2)
    return "", ""


def _library_links(files: FileSystem, source: str, target: str, for_linkers: bool) -> None:
    """Beside ``libx.so.580…`` its soname ``libx.so.1``, for programs, and ``libx.so``, for linkers (triton #8667)."""
    folder, _, name = target.rpartition("/")
    soname = elf.soname(source)
    for link in dict.fromkeys((soname, name.partition(".so")[0] + ".so" if for_linkers else "")):
        if link and link != name and "/" not in link:
            _link(files, f"{folder}/{link}", name)


def _link(files: FileSystem, path: str, target: str) -> None:
    folder, _, name = path.rpartition("/")
    fd = files.root.directory(folder)
    try:
        if files.facts.root == "read-only" and os.fstat(fd).st_dev == os.fstat(files.root.fd).st_dev:
            files.facts.note(f"no link {path}: the tree is left as it is")
            return
        if os.path.lexists(f"{fd_path(fd)}/{name}"):
            os.unlink(name, dir_fd=fd)
        os.symlink(target, name, dir_fd=fd)
    except OSError as error:
        raise RunnerError("sandbox.target", f"cannot link {path}: {error.strerror}") from None
    finally:
        os.close(fd)


def _write_configuration(root: Root, injection: Injection) -> None:
    fd = root.directory(_WORK)
    text = "".join(f"{folder}\n" for folder in (LIBRARIES, *injection.folders)) + "include /etc/ld.so.conf\n"
    with open(os.open("ld.so.conf", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644, dir_fd=fd), "w") as file:
        file.write(text)
    os.close(fd)


def activate(
    files: FileSystem, injection: Injection, root: Root, env: Mapping[str, str], control: int
) -> tuple[dict[str, str], dict[str, Any]]:
    """Make the loader find the driver, check that it does, and ask CUDA.

    Args:
        root: ``/`` of the sandbox, which has been entered.
        env: the program's variables so far.

    Returns:
        Variables to set, and facts for the receipt.

    Raises:
        RunnerError: ``gpu.shadowed`` names what hides the driver; ``gpu.ldcache``; ``gpu.missing`` (CUDA gives fewer
            than were given); ``gpu.none``, ``gpu.not_ready`` and the others of ``cudaprobe.MEANINGS``.
    """
    extra = dict(injection.env)
    extra["PATH"] = append(env, "PATH", TOOLS)
    extra["LIBRARY_PATH"] = prepend(env, "LIBRARY_PATH", ":".join((LIBRARIES, *injection.folders)))
    driver = _find_driver(injection)
    keep = files.facts.enter == "pivot_root"
    extra.update(_compat(files, injection, root, env))
    _refuse_shadows(root, {**env, **extra}, injection, compat="LD_LIBRARY_PATH" in extra)
    if not _renew_cache(root, keep, control):
        files.facts.note("the image has no ldconfig: LD_LIBRARY_PATH names the driver")
        extra["LD_LIBRARY_PATH"] = prepend({**env, **extra}, "LD_LIBRARY_PATH", os.path.dirname(driver))
    else:
        _check_cache(driver, keep, control)
    return extra, _probe(files, injection, driver, {**env, **extra}, keep)


def _find_driver(injection: Injection) -> str:
    places = [f"{LIBRARIES}/{os.path.basename(p)}" for p in injection.libraries] + [t for _, t in injection.files]
    found = [p for p in places if os.path.basename(p).startswith("libcuda.so")]
    if not found or not os.path.isfile(found[0]):
        raise RunnerError("gpu.libraries", "the driver's libcuda did not arrive in the sandbox")
    return found[0]


def _compat(files: FileSystem, injection: Injection, root: Root, env: Mapping[str, str]) -> dict[str, str]:
    folder, version = compat_folder(root)
    if not drivers.use_compat(injection.driver, version):
        return {}
    if not injection.compat:
        files.facts.note(f"the driver {injection.driver} is older than the image's compat libcuda {version}: not used")
        return {}
    files.facts.note(f"the image's compat libcuda {version} is used over the driver's {injection.driver}")
    return {"LD_LIBRARY_PATH": prepend(env, "LD_LIBRARY_PATH", folder)}


def _refuse_shadows(root: Root, env: Mapping[str, str], injection: Injection, compat: bool) -> None:
    """What is preloaded, and the folders of LD_LIBRARY_PATH, go before the loader's cache: no libcuda may be there."""
    ours = _identity(_find_driver(injection))
    preload = (root.read("/etc/ld.so.preload", 1 << 16) or b"").decode("utf-8", "surrogateescape")
    by = {
        "LD_PRELOAD": re.split("[: ]+", env.get("LD_PRELOAD", "")),
        "/etc/ld.so.preload": re.split(r"[:\s]+", re.sub("#.*", "", preload)),
    }
    if not compat:
        by["LD_LIBRARY_PATH"] = list(_found_by_path(env.get("LD_LIBRARY_PATH", "")))
    for way, paths in by.items():
        for path in paths:
            if os.path.basename(path).startswith("libcuda.so") and os.path.lexists(path) and _identity(path) != ours:
                raise RunnerError(
                    "gpu.shadowed", f"{path} of the image, by {way}, hides the driver's libcuda; "
                    f"take it out of {way} or the file out of the image",
                )  # fmt: skip


def _found_by_path(variable: str) -> Iterator[str]:
    """Where the loader looks for libcuda because of LD_LIBRARY_PATH, variants for newer processors first."""
    for folder in filter(None, re.split("[:;]", variable)) if variable else ():
        variants = sorted(glob.glob(os.path.join(glob.escape(folder), "glibc-hwcaps", "*")))
        for place in (*variants, folder):
            yield from (os.path.join(place, name) for name in ("libcuda.so.1", "libcuda.so"))


def _identity(path: str) -> tuple[int, int]:
    try:
        info = os.stat(path)
        return info.st_dev, info.st_ino
    except OSError:
        return (-1, -1)


def _ldconfig() -> str:
    return next((p for p in ("/sbin/ldconfig", "/usr/sbin/ldconfig", "/usr/bin/ldconfig") if os.access(p, os.X_OK)), "")


def _run_ldconfig(arguments: tuple[str, ...], keep: bool, control: int) -> tuple[int, bytes]:
    captures = (process.Capture(8 << 20), process.Capture(4096))
    program = process.Program(
        (_ldconfig(), *arguments), {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}, "/",
        lambda: become(Identity(0, 0, (), "/"), {}, keep), captures,
    )  # fmt: skip
    ended = program.run(_LDCONFIG_SECONDS, control)
    return ended.start_error or ended.status, captures[0].kept if ended.status == 0 else captures[1].kept


def _renew_cache(root: Root, keep: bool, control: int) -> bool:
    if not _ldconfig():
        return False
    status, output = _run_ldconfig(("-X", "-C", f"{_WORK}/ld.so.cache", "-f", f"{_WORK}/ld.so.conf"), keep, control)
    if status:
        raise RunnerError("gpu.ldcache", f"the image's ldconfig failed: {output.decode('utf-8', 'replace')[-500:]}")
    source, target = root.open(f"{_WORK}/ld.so.cache"), root.open(_CACHE, "file")
    try:
        syscalls.mount(fd_path(source), fd_path(target), "", syscalls.MS_BIND)
    except OSError as error:
        raise RunnerError("gpu.ldcache", f"cannot place {_CACHE}: {error}") from None
    finally:
        os.close(source)
        os.close(target)
    return True


def _check_cache(driver: str, keep: bool, control: int) -> None:
    status, output = _run_ldconfig(("-p",), keep, control)
    entries = drivers.cache_entries(output.decode("utf-8", "replace").splitlines()) if status == 0 else []
    found = [path for name, path in entries if name == "libcuda.so.1"]
    if not found:
        raise RunnerError("gpu.ldcache", "ldconfig -p in the sandbox does not list libcuda.so.1 (Triton asks it)")
    if _identity(found[0]) != _identity(driver):
        raise RunnerError("gpu.shadowed", f"{found[0]} of the image comes before the driver's {driver} in the cache")


def _probe(files: FileSystem, injection: Injection, driver: str, env: Mapping[str, str], keep: bool) -> dict[str, Any]:
    if not injection.probe_timeout:
        files.facts.note("CUDA was not asked whether it is ready")
        return {}
    # CUDA_INJECTION64_PATH names a library that cuInit loads: one of the image, into a process of the host's Python.
    visible = {k: v for k, v in env.items() if k.startswith(("CUDA_", "NVIDIA_")) and "INJECTION" not in k}
    found, code, message = cudaprobe.wait_ready(
        driver, visible, injection.probe_timeout, lambda: become(Identity(0, 0, (), "/"), {}, keep)
    )
    if code:
        raise RunnerError(code, f"{message} (driver {injection.driver})")
    given, seen = len(injection.gpus), len(found["devices"])
    # Of the parts of one or more GPUs (MIG) CUDA gives a program a single one.
    if seen < given and "CUDA_VISIBLE_DEVICES" not in env and not injection.partitioned:
        raise RunnerError(
            "gpu.missing", f"{given} GPUs were given, CUDA gives {seen}: one may have failed (nvidia-smi, dmesg), or a "
            "control group may forbid its node; to go on with fewer, name them",
        )  # fmt: skip
    return {"probe": found}
