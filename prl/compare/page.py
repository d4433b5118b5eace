"""One HTML page that needs nothing else: curves, sortable tables, dark and light."""

from __future__ import annotations

import time
from html import escape

from prl.compare.curves import AXES
from prl.compare.figure import make_curves_of_groups, render_svg
from prl.compare.phases import ABOUT_PHASES, groups_of_rows, phase_table
from prl.compare.ranking import Comparison
from prl.compare.table import Cell, Table, counts_line, footnotes, group_table, has_groups, point_table

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #667085; --line: #e3e6ec; --back: #fbfbfc; --card: #fff;
  --good: #0a7d4f; --bad: #b42318; --live: #8a6100; --hover: #f1f4f9; --faint: .4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ee; --soft: #98a1b3; --line: #2c3340; --back: #12151b;
  --card: #191d25; --faint: .6; --good: #4cc38a; --bad: #ff8b80; --live: #e2b340; --hover: #222835; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 24px 60px; max-width: 1360px; background: var(--back); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 15px; margin: 30px 0 8px; } p { margin: 0; }
.soft, footer { color: var(--soft); } footer p { margin-top: 7px; max-width: 105ch; font-size: 12.5px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; overflow-x: auto; }
.plot { padding: 14px 16px 10px; margin-top: 20px; }
.tabs { display: flex; gap: 4px; margin-bottom: 6px; }
.tabs button { font: inherit; font-size: 12.5px; padding: 3px 11px; border: 1px solid var(--line); border-radius: 99px;
  background: none; color: var(--soft); cursor: pointer; }
.tabs button[aria-pressed=true] { color: var(--card); background: var(--ink); border-color: var(--ink); }
svg { display: block; width: 100%; height: auto; } svg[hidden] { display: none; }
svg text { fill: var(--soft); font-size: 11.5px; } svg text.title { font-size: 12.5px; }
.grid { stroke: var(--line); } .tick { stroke: var(--soft); } .budget { stroke: var(--soft); stroke-dasharray: 2 3; }
.seed { stroke-width: 1; opacity: var(--faint); } .mean { stroke-width: 2.4; }
.curve { transition: opacity .12s; } .dim .curve:not(.lit) { opacity: .1; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 6px 4px 2px 56px; font-size: 12.5px; }
.legend span { cursor: default; } .legend svg { display: inline-block; width: 26px; height: 9px; margin-right: 6px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 9px; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; } td.n, th.n { text-align: right; }
td.why { white-space: normal; min-width: 260px; color: var(--soft); }
th { font-weight: 600; font-size: 12.5px; color: var(--soft); cursor: pointer; user-select: none; }
th:hover { color: var(--ink); } th[aria-sort=ascending]::after { content: " ↑"; }
th[aria-sort=descending]::after { content: " ↓"; }
tbody tr:hover, tr.lit { background: var(--hover); }
.good { color: var(--good); } .bad { color: var(--bad); } .live { color: var(--live); }
"""

SCRIPT = """
document.querySelectorAll('th').forEach(th => th.addEventListener('click', () => {
  const table = th.closest('table'), index = [...th.parentNode.children].indexOf(th);
  const down = th.getAttribute('aria-sort') === 'ascending';
  table.querySelectorAll('th').forEach(other => other.removeAttribute('aria-sort'));
  th.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const key = row => row.children[index].dataset.sort;
  const order = (a, b) => {
    if (key(a) === undefined || key(b) === undefined) return (key(a) === undefined) - (key(b) === undefined);
    const x = Number(key(a)), y = Number(key(b));
    const sign = isNaN(x) || isNaN(y) ? key(a).localeCompare(key(b)) : x - y;
    return down ? -sign : sign;
  };
  const body = table.tBodies[0];
  [...body.rows].sort(order).forEach(row => body.append(row));
}));
document.querySelectorAll('.tabs button').forEach(button => button.addEventListener('click', () => {
  document.querySelectorAll('.tabs button').forEach(b => b.setAttribute('aria-pressed', b === button));
  document.querySelectorAll('.plot > svg').forEach(svg =>
    svg.toggleAttribute('hidden', svg.dataset.axis !== button.dataset.axis));
}));
const light = group => {
  document.querySelectorAll('[data-group]').forEach(e => e.classList.toggle('lit', e.dataset.group === group));
  const drawn = document.querySelector(`g[data-group="${group}"]`) !== null;
  document.querySelectorAll('.plot').forEach(e => e.classList.toggle('dim', drawn));
};
document.querySelectorAll('[data-group]').forEach(e => {
  e.addEventListener('mouseenter', () => light(e.dataset.group));
  e.addEventListener('mouseleave', () => light(undefined));
});
"""
STATE_CLASSES = {
    "done": "good",
    "failed": "bad",
    "crashed": "bad",
    "lost": "bad",
    "missing": "bad",
    "killed": "bad",
    "unreadable": "bad",
}
VERDICT_CLASSES = {"best": "good", "worse": "bad"}
TEXT_COLUMNS = ("against the best", "state", "why")


def render_page(comparison: Comparison, phases: bool = False) -> str:
    tables = []
    if has_groups(comparison):
        tables.append("<h2>Groups</h2>" + _table(group_table(comparison), list(range(len(comparison.groups)))))
    index = [i for i, group in enumerate(comparison.groups) for _ in group.points]
    tables.append("<h2>Points</h2>" + _table(point_table(comparison), index))
    told = footnotes(comparison)
    if phases:
        tables.append("<h2>Phases</h2>" + _table(phase_table(comparison), groups_of_rows(comparison)))
        told = [*told, ABOUT_PHASES]
    notes = "".join(f"<p>{escape(note)}</p>" for note in told)
    _, _, counts = counts_line(comparison).rpartition(": ")
    made = time.strftime("%Y-%m-%d %H:%M")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(comparison.title)}</title><style>{STYLE}</style></head><body>"
        f'<h1>{escape(comparison.title)}</h1><p class="soft">{escape(counts)} · {made}</p>'
        f"{_plot(comparison)}{''.join(tables)}<footer><h2>Notes</h2>{notes}</footer>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _plot(comparison: Comparison) -> str:
    drawn = {axis: svg for axis in AXES if (svg := render_svg(comparison, axis))}
    if not drawn:
        return ""
    tabs = "".join(
        f'<button data-axis="{axis}" aria-pressed="{str(axis == comparison.axis).lower()}">{AXES[axis]}</button>'
        for axis in drawn
    )
    hidden = {axis: "" if axis == comparison.axis else " hidden" for axis in drawn}
    plots = "".join(svg.replace("<svg", f'<svg data-axis="{axis}"{hidden[axis]}', 1) for axis, svg in drawn.items())
    return f'<div class="card plot"><div class="tabs">{tabs}</div>{plots}{_legend(comparison)}</div>'


def _legend(comparison: Comparison) -> str:
    items = []
    for curve in make_curves_of_groups(comparison, comparison.axis):
        dashes = f' stroke-dasharray="{" ".join(map(str, curve.dashes))}"' if curve.dashes else ""
        line = f'<line x1="0" x2="26" y1="5" y2="5" stroke="{curve.color}" stroke-width="3"{dashes}/>'
        items.append(
            f'<span data-group="{curve.index}"><svg viewBox="0 0 26 9">{line}</svg>{escape(curve.label)}</span>'
        )
    return f'<div class="legend">{"".join(items)}</div>'


def _table(table: Table, groups: list[int]) -> str:
    numeric = [all(row[i].is_number or not row[i].text for row in table.rows) for i in range(len(table.headings))]
    numeric = [n and heading not in TEXT_COLUMNS for n, heading in zip(numeric, table.headings, strict=True)]
    heads = "".join(
        f"<th{' class=n' if n else ''}>{escape(h)}</th>" for h, n in zip(table.headings, numeric, strict=True)
    )
    rows = "".join(
        f'<tr data-group="{group}">'
        + "".join(_cell(c, n, h) for c, n, h in zip(row, numeric, table.headings, strict=True))
        + "</tr>"
        for row, group in zip(table.rows, groups, strict=True)
    )
    return f'<div class="card"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(cell: Cell, numeric: bool, heading: str) -> str:
    classes = ["n"] if numeric else []
    if heading == "state":
        classes.append(STATE_CLASSES.get(cell.text, "live"))
    elif heading == "against the best":
        classes.append(VERDICT_CLASSES.get(cell.text, ""))
    elif heading == "why":
        classes.append("why")
    attribute = f' class="{" ".join(filter(None, classes))}"' if any(classes) else ""
    sort = "" if cell.sort is None or cell.text == "" else f' data-sort="{escape(str(cell.sort))}"'
    return f"<td{attribute}{sort}>{escape(cell.text)}</td>"
