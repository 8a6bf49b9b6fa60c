"""The HTML page of a release: it renders, and says what the JSON says."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oci_builder.model.errors import TransportError
from oci_builder.model.gates import parse_gates
from oci_builder.model.receipts import Host
from oci_builder.model.sizes import human
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.page import render
from oci_builder.release.receipts import write_receipt
from oci_builder.release.treemap import squarify
from oci_builder.report import report_data, write_report
from tests.release.helpers import DOCKER, NOW, OCI, PORTABLE, SUBJECTS, checks, gpus, new_key, policy, receipt, trusted

KEY = new_key()
POLICY = policy(trusted(KEY))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HARDWARE = {"name": "B200", "capability": "10.0"}
GATES = parse_gates(
    [
        {"name": "container-archive", "title": "the archives are sound", "stage": "container", "checks": ["ok"],
         "subjects": list(SUBJECTS), "not_tested": ["full 8B training"]},
        {"name": "container-exec", "title": "it starts in a chroot", "stage": "exec", "checks": ["ok"]},
        {"name": "single", "title": "one B200", "stage": "single", "checks": ["ok"], "hardware": HARDWARE},
    ]
)  # fmt: skip
LAYERS = [
    {"name": "b", "from": "base", "digest": "sha256:" + "1" * 64, "size": 2_900_000_000, "tar_size": 6_100_000_000},
    {"name": "automodel+base+vllm", "digest": "sha256:" + "2" * 64, "size": 3_400_000_000, "tar_size": 6_448_000_000},
    {"name": "vllm", "digest": "sha256:" + "3" * 64, "size": 1_200_000_000, "tar_size": 2_418_000_000},
    {"name": "automodel", "digest": "sha256:" + "4" * 64, "size": 60_000_000, "tar_size": 116_000_000},
    {"name": "runtime", "digest": "sha256:" + "5" * 64, "size": 30_000, "tar_size": 150_000},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    release = ReleaseFolder(tmp_path / "v1-r1").create()
    portable = {"sha256": SUBJECTS[PORTABLE], "tiers": ["automodel", "base", "vllm"]}
    release.add("portable.json", json.dumps(portable).encode())
    archives = {n: {"sha256": SUBJECTS[n]} for n in (OCI, DOCKER)}
    release.add("container.json", json.dumps({"archives": archives, "layers": LAYERS}).encode())
    licences = ["MIT", "Apache-2.0", ""]
    packages = [
        {"name": f"pkg{i}", "version": f"{i}.0", "licence": licences[i % 3], "source": "PyPI"} for i in range(9)
    ]
    release.add("inventory-base.json", json.dumps({"tier": "base", "packages": packages}).encode())
    rows = [{"severity": "error" if i == 0 else "warning", "code": f"gpu.x{i}", "where": "a.so", "message": "no sm_100"}
            for i in range(61)]  # fmt: skip
    release.add("readiness.json", json.dumps({"ok": False, "target": "sm_100", "rows": rows}).encode())
    made = [
        receipt(),
        receipt("exec", checks=checks(ok="fail")),
        receipt("single", host=Host(os="ubuntu 24.04", driver="580.1", gpus=gpus(2, "NVIDIA H200", "9.0"))),
    ]
    for each in made:
        write_receipt(release.receipts, each, SUBJECTS, KEY)
    write_receipt(release.receipts, receipt("container"), SUBJECTS, new_key())
    return release.root


class Page(HTMLParser):
    """All tags with their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, key: str, value: str) -> dict[str, str]:
        return {a[key]: a[value] for _, a in self.tags if key in a}


def agrees(html: str, data: dict[str, Any]) -> None:
    page = Page(html)
    verdict = data["qualification"]
    assert page.values("data-gate", "data-state") == {g["name"]: g["state"] for g in verdict["gates"]}
    assert [a["data-state"] for _, a in page.tags if a.get("id") == "state"] == [verdict["state"]]
    assert page.values("data-layer", "data-tar-size") == {v["digest"]: str(v["tar_size"]) for v in data["layers"]}
    assert page.values("data-receipt", "data-answer") == {r["name"]: r["answer"] for r in data["receipts"]}
    assert page.values("data-packages", "data-count") == {t: str(len(p)) for t, p in data["packages"].items()}
    assert [a["data-readiness"] for _, a in page.tags if "data-readiness" in a] == [
        r["code"] for r in data["readiness"]["rows"]
    ]
    assert [a["data-ok"] for _, a in page.tags if a.get("id") == "ready"] == [str(data["readiness"]["ok"])]
    assert [a["data-state"] for _, a in page.tags if a.get("id") == "files"] == [data["files"]["state"]]
    for gate in verdict["gates"]:
        assert all(reason in page.text for reason in gate["reasons"])
    for tier in data["tiers"]:
        assert human(tier["own"] + tier["shared"]) in page.text
    for line in verdict["not_tested"]:
        assert line in page.text


def test_the_page_says_what_the_json_says(folder: Path) -> None:
    data = report_data(folder, GATES, POLICY, NOW)
    assert [g["state"] for g in data["qualification"]["gates"]] == ["met", "failed", "open"]
    assert json.loads(json.dumps(data)) == data
    agrees(render(data).decode(), data)


def test_the_page_says_whether_its_files_are_those_that_were_recorded(folder: Path) -> None:
    """A page shows licences, sizes and hashes; without a record receipt anybody may have written them."""
    assert report_data(folder, GATES, POLICY, NOW)["files"]["state"] == "unprotected"
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}
    write_receipt(folder / "receipts", receipt("record", details={"files": files}), SUBJECTS, KEY)
    assert report_data(folder, GATES, POLICY, NOW)["files"]["state"] == "recorded"
    inventory = folder / "inventory-base.json"
    inventory.write_bytes(inventory.read_bytes().replace(b"MIT", b"BSD"))
    data = report_data(folder, GATES, POLICY, NOW)
    assert data["files"]["state"] == "changed" and "inventory-base.json" in data["files"]["why"]
    agrees(render(data).decode(), data)


def test_tiers_add_up(folder: Path) -> None:
    tiers = {t["name"]: (t["own"], t["shared"]) for t in report_data(folder, GATES, POLICY, NOW)["tiers"]}
    assert tiers == {
        "automodel": (116_000_000, 6_448_000_000), "base": (0, 6_448_000_000), "vllm": (2_418_000_000, 6_448_000_000),
    }  # fmt: skip


def test_it_needs_nothing_from_outside_and_runs_nothing(folder: Path) -> None:
    page = Page(render(report_data(folder, GATES, POLICY, NOW)).decode())
    assert not {"script", "img", "link", "iframe", "object", "base", "form"} & {t for t, _ in page.tags}
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on") or a in ("href", "src", "action")]


def test_every_word_is_escaped(folder: Path) -> None:
    """Names that come from a receipt or an inventory are text, whatever they hold."""
    data = report_data(folder, GATES, POLICY, NOW)
    bad = "\"><script>alert(1)</script><b a='"

    def poison(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: poison(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [poison(v, key) for v in value]
        return value + bad if isinstance(value, str) and key != "kind" else value

    assert "script" not in {t for t, _ in Page(render(poison(data)).decode()).tags}


def test_an_empty_release_renders(tmp_path: Path) -> None:
    release = ReleaseFolder(tmp_path / "v1-r1").create()
    release.add("portable.json", json.dumps({"sha256": "a" * 64}).encode())
    assert "nothing has been proved" in render(report_data(release.root, GATES, POLICY, NOW)).decode()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10**11), max_size=40))
def test_a_treemap_has_the_right_areas_inside_the_frame(values: list[int]) -> None:
    rects = squarify(values, 960, 320)
    assert sorted(r.index for r in rects) == [i for i, v in enumerate(values) if v]
    for r in rects:
        assert abs(r.w * r.h - values[r.index] / sum(values) * 960 * 320) < 1e-3
        assert r.x >= -1e-3 and r.x + r.w <= 960 + 1e-3 and r.y >= -1e-3 and r.y + r.h <= 320 + 1e-3


def test_a_speck_beside_a_giant_still_has_a_place() -> None:
    assert [r.index for r in squarify([1, 10**18, 1], 960, 320)] == [1, 0, 2]


def chromium(*arguments: str, home: Path) -> bytes:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={home}", *arguments]
    return subprocess.run(command, capture_output=True, timeout=300, check=True).stdout


def test_a_page_replaces_a_file_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    """``report RELEASE /dev/stdout`` writes to it; a device or link that became a file would break the machine."""
    data = report_data(folder, GATES, POLICY, NOW)
    plain, link, device = (tmp_path / name for name in ("plain.html", "link.html", "device"))
    plain.write_text("old")
    link.symlink_to(tmp_path / "target.html")
    write_report(data, plain)
    write_report(data, link)
    assert link.is_symlink() and link.read_bytes() == plain.read_bytes() == render(data)
    if os.geteuid() == 0:
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        with contextlib.suppress(TransportError):  # mounted nodev
            write_report(data, device)
        assert stat.S_ISCHR(device.lstat().st_mode)


@pytest.mark.skipif(not CHROMIUM, reason="no browser: install chromium, or nobody looks at the page")
class TestBrowser:
    def test_the_rendered_page_agrees_with_the_json(self, folder: Path, tmp_path: Path) -> None:
        data = report_data(folder, GATES, POLICY, NOW)
        write_report(data, tmp_path / "report.html")
        agrees(chromium("--dump-dom", f"file://{tmp_path}/report.html", home=tmp_path / "c").decode(), data)

    def test_a_screenshot_is_not_empty(self, folder: Path, tmp_path: Path) -> None:
        write_report(report_data(folder, GATES, POLICY, NOW), tmp_path / "report.html")
        shot = tmp_path / "shot.png"
        page = f"file://{tmp_path}/report.html"
        chromium(f"--screenshot={shot}", "--window-size=1100,1900", page, home=tmp_path / "c")
        width, height, colours = png_colours(shot.read_bytes())
        assert (width, height) == (1100, 1900)
        # Blue of a tier's own layer, teal of a shared one, and the three state colours are all on it.
        assert {(0x31, 0x55, 0xA6), (0x1F, 0x6F, 0x78), (0x12, 0x75, 0x4A), (0xB3, 0x26, 0x1E)} <= colours


def png_colours(data: bytes) -> tuple[int, int, set[tuple[int, ...]]]:
    """Size and colours of an 8-bit RGB or RGBA PNG (RFC 2083)."""
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert depth == 8
    step = {2: 3, 6: 4}[kind]
    packed = b"".join(data[m.end() : m.end() + struct.unpack(">I", data[m.start() - 4 : m.start()])[0]]
                      for m in re.finditer(b"IDAT", data))  # fmt: skip
    raw, line, colours = zlib.decompress(packed), bytearray(width * step), set()
    for y in range(height):
        at = y * (width * step + 1)
        line = _unfilter(raw[at], raw[at + 1 : at + 1 + width * step], line, step)
        colours |= {tuple(line[x : x + 3]) for x in range(0, width * step, step * 2)}
    return width, height, colours


def _unfilter(kind: int, row: bytes, above: bytearray, step: int) -> bytearray:
    out = bytearray(row)
    if kind == 0:
        return out
    for i, value in enumerate(row):
        left = out[i - step] if i >= step else 0
        up, corner = above[i], above[i - step] if i >= step else 0
        guess = (0, left, up, (left + up) // 2, _paeth(left, up, corner))[kind]
        out[i] = (value + guess) & 255
    return out


def _paeth(left: int, up: int, corner: int) -> int:
    near = left + up - corner
    return min((abs(near - left), 0, left), (abs(near - up), 1, up), (abs(near - corner), 2, corner))[2]


def test_a_token_in_a_record_is_not_shown(folder: Path) -> None:
    token = "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"
    text = (folder / "container.json").read_text().replace('"vllm"', f'"vllm {token}"')
    (folder / "container.json").chmod(0o644)
    (folder / "container.json").write_text(text)
    data = report_data(folder, GATES, POLICY, NOW)
    assert token not in str(data) and token not in render(data).decode()
    assert "vllm ***" in [layer["name"] for layer in data["layers"]]
