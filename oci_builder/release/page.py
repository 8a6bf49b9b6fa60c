"""One self-contained HTML page for a release: no scripts, no links out, every word of it escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from oci_builder.model.sizes import human
from oci_builder.release.treemap import squarify

_WIDTH, _HEIGHT = 960, 320

_STYLE = """
:root{--ink:#1c2430;--soft:#5b6675;--line:#d9dee6;--paper:#fff;--card:#f6f8fb;--met:#12754a;--failed:#b3261e;
--open:#8a5a00;--accent:#3155a6}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#a3adba;--line:#333c49;--paper:#12161c;--card:#1a2029;
--met:#4cc38a;--failed:#ff8a80;--open:#f0b95a;--accent:#8fb0ff}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1024px;padding:32px 24px 64px;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:28px;margin:0;display:flex;gap:14px;align-items:center}h2{font-size:18px;margin:40px 0 12px}
code{font:12.5px/1.4 ui-monospace,monospace;overflow-wrap:anywhere}p{margin:6px 0}.soft{color:var(--soft)}
.wide{overflow-x:auto}
.pill{font-size:13px;font-weight:600;padding:2px 12px;border-radius:99px;border:1.5px solid;white-space:nowrap}
.met,.pass,.verified{color:var(--met)}.failed,.fail,.error{color:var(--failed)}
.open,.candidate,.superseded,.deferred,.skipped{color:var(--open)}
table{width:100%;border-collapse:collapse}th{text-align:left;font-weight:600;color:var(--soft);font-size:13px}
th,td{padding:7px 10px 7px 0;border-bottom:1px solid var(--line);vertical-align:top}
td.num,th.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
ul{margin:4px 0 0;padding-left:18px}li{overflow-wrap:anywhere}details{border:1px solid var(--line);border-radius:8px;
margin:10px 0;background:var(--card)}summary{padding:10px 14px;cursor:pointer;font-weight:600}
details>div{padding:0 14px 12px;max-height:420px;overflow:auto}svg{width:100%;height:auto;border-radius:8px}
svg text{font:600 12px system-ui,sans-serif;fill:#fff}svg rect{stroke:var(--paper);stroke-width:2}
.legend{display:flex;flex-wrap:wrap;gap:6px 18px;font-size:13px;margin:8px 0}.legend i{display:inline-block;width:11px;
height:11px;border-radius:3px;margin-right:6px}
"""

_COLOURS = {"base": "#5b6b80", "shared": "#1f6f78", "own": "#3155a6", "runtime": "#7a4d9f"}
_KINDS = {"base": "base image", "shared": "shared by tiers", "own": "one tier", "runtime": "runtime files"}


def render(data: Mapping[str, Any]) -> bytes:
    """The page for ``report_data``'s value. Deterministic."""
    verdict = data["qualification"]
    body = [
        _header(data, verdict),
        _gates(verdict["gates"]),
        _layers(data["layers"]),
        _tiers(data["tiers"]),
        _readiness(data["readiness"]),
        _packages(data["packages"]),
        _receipts(data["receipts"]),
        _not_tested(verdict["not_tested"]),
    ]
    title = escape(f"{data['release']}: {verdict['state']}")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style>'
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'.encode()


def _cell(text: object, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(str(text))}</td>' if kind else f"<td>{escape(str(text))}</td>"


def _table(head: Sequence[str], rows: Iterable[str], numeric: Sequence[int] = ()) -> str:
    cells = "".join(f'<th class="num">{h}</th>' if i in numeric else f"<th>{h}</th>" for i, h in enumerate(head))
    table = f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _items(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _state(state: str) -> str:
    word = escape(state)
    return f'<span class="{word}">{word}</span>'


def _header(data: Mapping[str, Any], verdict: Mapping[str, Any]) -> str:
    state = escape(verdict["state"])
    rows = (f"<tr>{_cell(n)}<td><code>{escape(s)}</code></td></tr>" for n, s in sorted(verdict["subjects"].items()))
    pill = f'<span id="state" class="pill {state}" data-state="{state}">{state}</span>'
    when = f'<p class="soft">Judged at {escape(verdict["evaluated_at"])}. A gate is met by signed receipts only.</p>'
    files, kind = data["files"], {"recorded": "met", "changed": "failed"}.get(data["files"]["state"], "open")
    mark = f'<span id="files" class="{kind}" data-state="{escape(files["state"])}">{escape(files["why"])}</span>'
    said = f"<p>Files: {mark}</p>"
    return f"<h1>{escape(data['release'])} {pill}</h1>{when}{said}{_table(('archive', 'sha256'), rows)}"


def _gates(gates: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for gate in gates:
        name, state = escape(gate["name"]), escape(gate["state"])
        title = f'<p class="soft">{escape(gate["title"])}</p>' if gate["title"] else ""
        need = "required" if gate["required"] else "not required"
        shown = "".join(f'<p><code class="soft">{escape(r)}</code></p>' for r in gate["receipts"])
        why = _items(gate["reasons"]) + shown
        before = _items([f"earlier: {h}" for h in gate["history"]])
        rows.append(
            f'<tr data-gate="{name}" data-state="{state}"><td><b>{name}</b>{title}</td>'
            f'<td>{_state(state)}<br><span class="soft">{need}</span></td><td>{why}{before}</td></tr>'
        )
    met = sum(g["state"] == "met" for g in gates)
    head = f'<h2>Gates <span class="soft" id="met">{met} of {len(gates)} met</span></h2>'
    return head + _table(("gate", "state", "by"), rows)


def _layers(layers: Sequence[Mapping[str, Any]]) -> str:
    if not layers:
        return ""
    sizes = [int(layer["tar_size"]) for layer in layers]
    boxes = "".join(_box(layers[r.index], r.x, r.y, r.w, r.h) for r in squarify(sizes, _WIDTH, _HEIGHT))
    used = [k for k in _KINDS if any(layer["kind"] == k for layer in layers)]
    legend = "".join(f'<span><i style="background:{_COLOURS[k]}"></i>{_KINDS[k]}</span>' for k in used)
    rows = (
        f'<tr data-layer="{escape(v["digest"])}" data-size="{v["size"]}" data-tar-size="{v["tar_size"]}">'
        f'<td>{escape(v["name"])}<br><code class="soft">{escape(v["digest"])}</code></td>'
        f"{_cell(human(v['tar_size']), 'num')}{_cell(human(v['size']), 'num')}</tr>"
        for v in layers
    )
    drawn = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="layers by size">{boxes}</svg>'
    total = f'<span class="soft" id="total" data-bytes="{sum(sizes)}">{human(sum(sizes))} unpacked</span>'
    table = _table(("layer", "unpacked", "compressed"), rows, numeric=(1, 2))
    return f'<h2>Layers {total}</h2>{drawn}<div class="legend">{legend}</div>{table}'


def _box(layer: Mapping[str, Any], x: float, y: float, w: float, h: float) -> str:
    label = f"{layer['name']} · {human(layer['tar_size'])}"
    fit = next((t for t in (label, layer["name"]) if w > 7.2 * len(t) + 12 and h > 24), "")
    text = f'<text x="{x + 10:.1f}" y="{y + 20:.1f}">{escape(fit)}</text>' if fit else ""
    colour = _COLOURS[layer["kind"]]
    return (
        f'<g><title>{escape(label)}</title><rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" rx="4" '
        f'fill="{colour}"/>{text}</g>'
    )


def _tiers(tiers: Sequence[Mapping[str, Any]]) -> str:
    if not tiers:
        return ""
    rows = (
        f'<tr data-tier="{escape(t["name"])}"><td>{escape(t["name"])}</td>{_cell(human(t["own"]), "num")}'
        f"{_cell(human(t['shared']), 'num')}{_cell(human(t['own'] + t['shared']), 'num')}</tr>"
        for t in tiers
    )
    head = ("tier", "its own layer", "layers it shares", "together")
    return "<h2>Tiers</h2>" + _table(head, rows, numeric=(1, 2, 3))


def _packages(packages: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    parts = []
    for tier, listed in sorted(packages.items()):
        rows = (
            f"<tr>{_cell(p['name'])}{_cell(p['version'])}{_cell(p['licence'] or 'not stated')}{_cell(p['source'])}</tr>"
            for p in listed
        )
        table = _table(("package", "version", "licence", "source"), rows)
        parts.append(
            f'<details data-packages="{escape(tier)}" data-count="{len(listed)}">'
            f"<summary>{escape(tier)}: {len(listed)} packages</summary><div>{table}</div></details>"
        )
    return "<h2>Packages</h2>" + "".join(parts) if parts else ""


def _readiness(found: Mapping[str, Any] | None) -> str:
    if not found:
        return ""
    word = "ready" if found["ok"] else "not ready"
    pill = f'<span id="ready" class="{"met" if found["ok"] else "failed"}" data-ok="{found["ok"]}">{word}</span>'
    rows = (
        f'<tr data-readiness="{escape(r["code"])}"><td>{escape(r["severity"])}</td><td>{escape(r["code"])}</td>'
        f'<td>{escape(r["message"])}<br><code class="soft">{escape(r["where"])}</code></td></tr>'
        for r in found["rows"]
    )
    left = f'<p class="soft">{found["left"]} more in readiness.json</p>' if found["left"] else ""
    return f"<h2>Readiness for {escape(found['target'])}: {pill}</h2>" + _table(("", "code", "what"), rows) + left


def _receipts(receipts: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for r in receipts:
        outcomes = ", ".join(f"{n} {o}" for o, n in sorted(r["outcomes"].items()))
        answer = escape(r["answer"])
        why = _items(r["reasons"])
        machine = " · ".join(x for x in (r["os"], f"driver {r['driver']}" if r["driver"] else "") if x)
        rows.append(
            f'<tr data-receipt="{escape(r["name"])}" data-answer="{answer}"><td><b>{escape(r["stage"])}</b>'
            f'<br><code class="soft">{escape(r["name"])}</code></td><td>{_state(r["answer"])}{why}</td>'
            f"{_cell(r['engine'])}<td>{escape(r['gpus'] or 'no GPU')}"
            f'<br><span class="soft">{escape(machine)}</span></td>'
            f"{_cell(outcomes)}</tr>"
        )
    if not rows:
        return '<h2>Receipts</h2><p class="soft">None: nothing has been proved yet.</p>'
    return "<h2>Receipts</h2>" + _table(("receipt", "signature", "engine", "hardware", "checks"), rows)


def _not_tested(lines: Sequence[str]) -> str:
    return "<h2>Not tested</h2>" + _items(lines) if lines else ""
