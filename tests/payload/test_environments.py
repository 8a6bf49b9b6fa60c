"""Environments made by the real uv from wheels of our own; no index is asked (field reports E, requirements 2)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pydantic import ValidationError

from oci_builder.model.errors import IntegrityError, SpecError
from oci_builder.model.events import silent
from oci_builder.model.spec import LockTier, RequirementsTier
from oci_builder.payload import environments
from oci_builder.payload import uv as tools
from oci_builder.payload.environments import realize
from oci_builder.payload.lists import keep_packages
from tests.lab.uv import require_uv

require_uv()


def wheel(folder: Path, name: str, version: str, body: str) -> str:
    """Write a small wheel with a module and a launcher; return its sha256."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": body,
        f"{info}/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nLicense-Expression: MIT\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-run = {name}:main\n",
        f"{info}/licenses/LICENSE": "do as you like\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for place, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(place), text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with wheels one (1.0), two (1.0, 2.0) and the list base.txt; uv reads no index and has its own cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    body = "import sys\ndef main():\n    print(sys.prefix)\n"
    one, two = wheel(wheels, "one", "1.0", body), wheel(wheels, "two", "1.0", body)
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "base.txt").write_text(f"one==1.0 \\\n    --hash=sha256:{one}\ntwo==1.0 \\\n    --hash=sha256:{two}\n")
    return tmp_path


def listing(root: Path) -> list[tuple[str, int, int, bytes]]:
    """Path, mode, mtime (of what uv's cache does not share), content or link of everything below a folder."""
    out = []
    for path in [root, *sorted(root.rglob("*"))]:
        found = path.lstat()
        content = os.fsencode(os.readlink(path)) if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
        shared = found.st_nlink > 1 and not path.is_dir()
        out.append((str(path.relative_to(root)), found.st_mode, 0 if shared else found.st_mtime_ns, content))
    return out


TIER = RequirementsTier(requirements="base.txt")


def test_two_builds_in_other_places_under_other_umasks_are_the_same(place: Path) -> None:
    first = realize("base", TIER, place, place / "w1", silent)
    old = os.umask(0o077)
    try:
        second = realize("base", TIER, place, place / "elsewhere" / "w2", silent)
    finally:
        os.umask(old)
    assert listing(first) == listing(second)


def test_nothing_names_the_folder_it_was_made_in(place: Path) -> None:
    env = realize("base", TIER, place, place / "work", silent)
    guilty = [p for p in env.rglob("*") if p.is_file() and os.fsencode(place / "work") in p.read_bytes()]
    assert guilty == []


def test_launchers_work_after_a_move(place: Path) -> None:
    env = realize("base", TIER, place, place / "work", silent)
    moved = env.rename(place / "moved here")
    done = subprocess.run([moved / "bin" / "one-run"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(moved)


def test_equal_packages_of_two_tiers_are_one_inode(place: Path) -> None:
    one, two = (realize(name, TIER, place, place / "work", silent) for name in ("base", "vllm"))
    inodes = {next(env.glob("lib/python*/site-packages/one.py")).stat().st_ino for env in (one, two)}
    assert len(inodes) == 1


def test_unchanged_inputs_leave_the_environment_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = realize("base", TIER, place, place / "work", silent)
    monkeypatch.setattr(environments, "_make", lambda *_: pytest.fail("made again"))
    assert realize("base", TIER, place, place / "work", silent) == first


def test_another_interpreter_build_is_another_environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = realize("base", TIER, place, place / "work", silent)
    real = tools.find_interpreter

    def other(*args: object) -> tools.Interpreter:
        found = real(*args)  # type: ignore[arg-type]
        return tools.Interpreter(found.path, found.identity + " rebuilt")

    monkeypatch.setattr(tools, "find_interpreter", other)
    assert realize("base", TIER, place, place / "work", silent) != first


def test_left_out_packages_are_named_in_the_inventory_and_not_installed(place: Path) -> None:
    tier = RequirementsTier(requirements="base.txt", omit={"Two": "needs nvcc"})
    env = realize("base", tier, place, place / "work", silent)
    inventory = json.loads((env.parent / "inventory.json").read_bytes())
    assert inventory["omitted"] == {"Two": "needs nvcc"}
    assert [(p["name"], p["version"], p["licence"]) for p in inventory["packages"]] == [("one", "1.0", "MIT")]
    assert not list(env.glob("lib/python*/site-packages/two*"))


def test_inventory_gives_hash_and_licence_text(place: Path) -> None:
    env = realize("base", TIER, place, place / "work", silent)
    package = json.loads((env.parent / "inventory.json").read_bytes())["packages"][0]
    built = (place / "wheels" / "one-1.0-py3-none-any.whl").read_bytes()
    assert package["hashes"] == [hashlib.sha256(built).hexdigest()]
    assert package["licence_files"] == ["one-1.0.dist-info/licenses/LICENSE"]


def test_a_reason_about_nothing_is_an_error(place: Path) -> None:
    tier = RequirementsTier(requirements="base.txt", omit={"three": "why"})
    with pytest.raises(SpecError) as caught:
        realize("base", tier, place, place / "work", silent)
    assert caught.value.code == "payload.omit"


def test_wrong_bytes_are_refused_and_leave_nothing(place: Path) -> None:
    wheel(place / "wheels", "one", "1.0", "print('other')\n")
    with pytest.raises(IntegrityError) as caught:
        realize("base", TIER, place, place / "work", silent)
    assert caught.value.code == "payload.hash"
    assert [p.name for p in (place / "work").iterdir()] == []


@pytest.mark.parametrize(
    "text",
    ["one==1.0\n", "one>=1.0 --hash=sha256:" + "0" * 64 + "\n", "one==x --hash=sha256:" + "0" * 64 + "\n",
     "one==7 --hash=sha256:" + "0" * 64 + "\n", "one==1.0 --hash=sha256:" + "0" * 64 + " ; python_version > '3'\n"],
)  # fmt: skip
def test_a_list_that_cannot_be_installed_is_a_wrong_input(place: Path, text: str) -> None:
    """No hash, no version, none that there is, a marker after the hash (review 21)."""
    (place / "base.txt").write_text(text)
    with pytest.raises(SpecError) as caught:
        realize("base", TIER, place, place / "work", silent)
    assert caught.value.code == "payload.list"


@pytest.mark.parametrize("more", [{"python": "--help"}, {"python": ""}, {"omit": {"one": " "}}])
def test_values_that_say_nothing_are_refused(more: dict[str, object]) -> None:
    """An option of uv's as a Python; a package left out without a reason (review 21)."""
    with pytest.raises(ValidationError):
        RequirementsTier.model_validate({"requirements": "base.txt", **more})


@pytest.mark.parametrize(
    "line",
    [
        "-r {}/inc.txt", "-r inc.txt", "-r{}/inc.txt", "  --requirement={}/inc.txt", "-c {}/inc.txt", "-e {}/inc", "-e .",
        "--constraint \\\n  {}/inc.txt", "--find-links wheels", "one @ file:wheels/one-1.0-py3-none-any.whl",
        "./wheels/one-1.0-py3-none-any.whl --hash=sha256:00", "--pre",
    ],
)  # fmt: skip
def test_a_list_that_takes_in_other_files_is_refused(place: Path, line: str) -> None:
    """What another file says is not in the key: the next build would ship the old packages without a word."""
    (place / "inc.txt").write_text((place / "base.txt").read_text())
    (place / "base.txt").write_text("# all of it\n" + line.format(place) + "\n")
    with pytest.raises(SpecError) as caught:
        realize("base", TIER, place, place / "work", silent)
    assert caught.value.code == "payload.list" and caught.value.fields["where"] == "tiers.base.requirements"


def test_a_list_may_say_where_packages_come_from(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_FIND_LINKS")
    listed = (place / "base.txt").read_text()
    text = f"--find-links {place}/wheels  # ours\n--no-index\n--only-binary=:all:\n{listed}"
    (place / "base.txt").write_text(text)
    assert realize("base", TIER, place, place / "work", silent).is_dir()


def test_a_wheel_by_path_is_pinned_by_its_hash_and_its_folder_is_not_named(place: Path) -> None:
    one = place / "wheels/one-1.0-py3-none-any.whl"
    digest = hashlib.sha256(one.read_bytes()).hexdigest()
    (place / "base.txt").write_text(f"one @ {one.as_uri()} --hash=sha256:{digest}\n")
    env = realize("base", TIER, place, place / "work", silent)
    found = json.loads((env.parent / "inventory.json").read_bytes())["packages"]
    assert [(p["name"], p["hashes"], p["source"]) for p in found] == [("one", [digest], "local")]


def test_cache_on_another_file_system_is_an_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == place.stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    monkeypatch.setenv("UV_CACHE_DIR", str(shm / f"uv-{os.getpid()}"))
    try:
        with pytest.raises(SpecError) as caught:
            realize("base", TIER, place, place / "work", silent)
    finally:
        subprocess.run(["rm", "-rf", shm / f"uv-{os.getpid()}"], check=True)
    assert caught.value.code == "payload.hardlinks"


def test_b124_a_pipe_for_a_list_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "list.txt")
    with pytest.raises(SpecError, match="is not a file") as caught:
        realize("base", RequirementsTier(requirements="list.txt"), tmp_path, tmp_path / "work", silent)
    assert caught.value.code == "spec.path"


@pytest.mark.parametrize("python", ["/nonexistent/python", "9.99"])
def test_an_interpreter_that_is_not_there(place: Path, python: str) -> None:
    with pytest.raises(SpecError) as caught:
        realize("base", RequirementsTier(requirements="base.txt", python=python), place, place / "work", silent)
    assert caught.value.code == "spec.path"


def test_another_uv_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "UV_VERSION", "0.0.1")
    with pytest.raises(SpecError) as caught:
        tools.find_uv(tmp_path)
    assert caught.value.code == "payload.uv"


def test_variables_of_another_environment_do_not_reach_uv(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/nonexistent")
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    monkeypatch.setenv("UV_LINK_MODE", "copy")
    env = realize("base", TIER, place, place / "work", silent)
    assert next(env.glob("lib/python*/site-packages/one.py")).stat().st_nlink > 1


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("UV_INDEX_URL", True), ("UV_INDEX_OUR_OWN_PASSWORD", True), ("UV_CONCURRENT_BUILDS", True),
        ("SSL_CERT_FILE", True), ("UV_PYTHON_INSTALL_MIRROR", True), ("UV_NO_DEV", False), ("UV_NO_GROUP", False),
        ("UV_NO_DEFAULT_GROUPS", False), ("UV_LOCKED", False), ("UV_CONFIG_FILE", False), ("UV_NO_BINARY", False),
        ("UV_EXCLUDE_NEWER", False), ("UV_TORCH_BACKEND", False), ("UV_OVERRIDE", False), ("UV_NEW_IN_2027", False),
    ],
)  # fmt: skip
def test_of_uvs_variables_those_pass_that_say_where_packages_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, passes: bool
) -> None:
    program = tmp_path / "uv"
    program.write_text("#!/bin/sh\nenv\n")
    program.chmod(0o755)
    monkeypatch.setenv(name, "said-by-the-shell")
    told = tools.Uv(program, tmp_path).run("sync")
    assert (f"{name}=said-by-the-shell" in told) is passes


def test_omitted_entries_go_with_their_hashes_and_nothing_else() -> None:
    text = (
        "--index-url x\na==1 \\\n    --hash=sha256:0\n    # via b\nB_b[extra]==2 \\\n    --hash=sha256:1\n-e .\nc==3\n"
    )
    assert "".join(keep_packages(text, {"b-b": "r"}, "t")) == (
        "--index-url x\na==1 \\\n    --hash=sha256:0\n    # via b\n-e .\nc==3\n"
    )


class TestLock:
    """A tier from a checkout with a ``uv.lock`` and extras."""

    @pytest.fixture
    def project(self, place: Path) -> Path:
        folder = place / "project"
        folder.mkdir()
        (folder / "pyproject.toml").write_text(
            '[project]\nname = "whole"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["one"]\n'
            '[project.optional-dependencies]\nfast = ["two"]\n'
        )
        uv = tools.find_uv(place)
        uv.run("lock", "--quiet", "--project", folder, "--python", sys.executable)
        for words in (
            ["init", "-q"],
            ["add", "."],
            ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "x"],
        ):
            subprocess.run(["git", "-C", folder, *words], check=True)
        return folder

    def installed(self, env: Path) -> set[str]:
        return {p.name.split("-")[0] for p in env.glob("lib/python*/site-packages/*.dist-info")}

    def test_extras_choose_and_the_project_itself_is_not_installed(self, place: Path, project: Path) -> None:
        plain = realize("base", LockTier(project="project"), place, place / "work", silent)
        fast = realize("fast", LockTier(project="project", extras=("fast",)), place, place / "work", silent)
        assert (self.installed(plain), self.installed(fast)) == ({"one"}, {"one", "two"})

    def test_an_extra_that_there_is_not_is_a_wrong_input(self, place: Path, project: Path) -> None:
        with pytest.raises(SpecError) as caught:
            realize("base", LockTier(project="project", extras=("nope",)), place, place / "work", silent)
        assert caught.value.code == "payload.lock"

    def test_omit(self, place: Path, project: Path) -> None:
        tier = LockTier(project="project", extras=("fast",), omit={"two": "no toolchain"})
        env = realize("fast", tier, place, place / "work", silent)
        assert self.installed(env) == {"one"}
        assert json.loads((env.parent / "inventory.json").read_bytes())["omitted"] == {"two": "no toolchain"}

    def test_the_shell_does_not_choose_the_groups(
        self, place: Path, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with open(project / "pyproject.toml", "a") as file:
            file.write('[dependency-groups]\ndev = ["two"]\n')
        tools.find_uv(place).run("lock", "--quiet", "--project", project, "--python", sys.executable)
        subprocess.run(
            ["git", "-C", project, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qam", "y"], check=True
        )
        monkeypatch.setenv("UV_NO_DEV", "1")
        monkeypatch.setenv("UV_NO_DEFAULT_GROUPS", "1")
        assert self.installed(realize("base", LockTier(project="project"), place, place / "work", silent)) == {
            "one",
            "two",
        }

    def test_build_variables_are_part_of_the_inputs(self, place: Path, project: Path) -> None:
        plain = realize("base", LockTier(project="project"), place, place / "work", silent)
        tier = LockTier(project="project", build_env={"TORCH_CUDA_ARCH_LIST": "10.0"})
        assert realize("base", tier, place, place / "work", silent) != plain

    def test_the_commit_is_verified(self, place: Path, project: Path) -> None:
        head = subprocess.check_output(["git", "-C", project, "rev-parse", "HEAD"], text=True).strip()
        realize("base", LockTier(project="project", commit=head), place, place / "work", silent)
        with pytest.raises(SpecError) as caught:
            realize("base", LockTier(project="project", commit="0" * 40), place, place / "work", silent)
        assert caught.value.code == "payload.commit"

    def test_a_changed_checkout_is_refused(self, place: Path, project: Path) -> None:
        head = subprocess.check_output(["git", "-C", project, "rev-parse", "HEAD"], text=True).strip()
        with open(project / "pyproject.toml", "a") as file:
            file.write("# changed\n")
        with pytest.raises(SpecError) as caught:
            realize("base", LockTier(project="project", commit=head), place, place / "work", silent)
        assert caught.value.code == "payload.commit"

    def test_another_lock_than_the_pinned_one_is_refused(self, place: Path, project: Path) -> None:
        (place / "pinned.lock").write_text("version = 1\n")
        with pytest.raises(SpecError) as caught:
            realize("base", LockTier(project="project", lock="pinned.lock"), place, place / "work", silent)
        assert caught.value.code == "payload.lock"

    def test_a_lock_nested_deeper_than_python_goes_is_a_wrong_input(self, place: Path, project: Path) -> None:
        (project / "uv.lock").write_text("x = " + "[" * 5000)
        subprocess.run(
            ["git", "-C", project, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qam", "y"], check=True
        )
        with pytest.raises(SpecError) as caught:
            realize("base", LockTier(project="project"), place, place / "work", silent)
        assert caught.value.code == "payload.lock"


def test_a_missing_python_is_asked_of_uv_and_the_mirror_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = place / "mirror"
    mirror.mkdir()
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", mirror.as_uri())
    with pytest.raises(SpecError) as caught:
        tools.find_interpreter("3.13.13", tools.find_uv(place / "work"), "tiers.base.python")
    assert caught.value.code == "spec.path"
    assert str(mirror) in caught.value.message
