"""The frame of every HTML report: one file, no network, light, readable from a phone to a wide screen.

A report is a title, a lead sentence and sections; each section is made by whoever knows its subject.
The content security policy forbids every request, so a report cannot come to depend on one.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from lowtide.report._palette import BUDGET, FONT, GRID, INK, MUTED, REPLAY


@dataclass(frozen=True)
class Section:
    """One part of a report.

    Attributes:
        heading: plain text.
        body: HTML, escaped by its maker.
        note: a plain sentence under the heading.
    """

    heading: str
    body: str
    note: str = ""


def page(title: str, lead: str, sections: tuple[Section, ...], *, scripts: tuple[str, ...] = ()) -> str:
    """Put a report together.

    Args:
        title, lead: plain text.
        sections: from top to bottom.
        scripts: JavaScript sources for the head, such as plotly.js.

    Returns:
        A complete HTML document.
    """
    head = "".join(f"<script>{script}</script>" for script in (*scripts, _SORT))
    body = "".join(_section(section) for section in sections)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n{head}\n</head>\n<body>\n<main>\n<header><h1>{escape(title)}</h1><p>{escape(lead)}</p></header>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
    return f"<section><h2>{escape(section.heading)}</h2>{note}{section.body}</section>\n"


_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
# Where a table is wider than the window, its hidden side lies in a shadow, which the white ends of the table cover.
_SHADOW = (
    "linear-gradient(to right, #fff 24px, transparent 48px) local, linear-gradient(to left, #fff 24px, transparent 48px) local, "
    "linear-gradient(to right, rgba(31, 41, 55, .16), transparent 14px), linear-gradient(to left, rgba(31, 41, 55, .16), transparent 14px)"
)
_STYLE = f"""
:root {{ color-scheme: light; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: #f6f7f9; color: {INK}; font: 15px/1.5 {FONT}; }}
main {{ max-width: 1280px; margin: 0 auto; padding: 28px clamp(12px, 3vw, 40px) 48px; }}
h1 {{ font-size: clamp(22px, 3vw, 30px); line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; overflow-wrap: anywhere; }}
h2 {{ font-size: 18px; margin: 0 0 4px; }}
header p {{ margin: 0 0 22px; color: {MUTED}; font-size: 16px; max-width: 110ch; }}
section {{ background: #fff; border: 1px solid {GRID}; border-radius: 12px; padding: clamp(14px, 2vw, 24px); margin: 0 0 20px; }}
.note {{ margin: 0 0 12px; color: {MUTED}; max-width: 110ch; }}
h3 {{ font-size: 15px; margin: 18px 0 4px; }}
.plot {{ height: clamp(520px, 74vh, 820px); }}
.plot.half {{ height: clamp(380px, 52vh, 560px); }}
.plot.strip {{ height: 240px; }}
.sortable th {{ cursor: pointer; user-select: none; }}
.sortable th:focus-visible {{ outline: 2px solid {REPLAY}; outline-offset: -2px; }}
th[aria-sort=ascending]::after {{ content: " ▲"; }}
th[aria-sort=descending]::after {{ content: " ▼"; }}
#advice td:last-child {{ overflow-wrap: anywhere; min-width: 26ch; }}
.why {{ min-width: 34ch; font-size: 13px; color: {MUTED}; }}
.why b {{ color: {INK}; font-weight: 600; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 8px; padding: 0; list-style: none; font-size: 13px; }}
.legend i {{ display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 7px; vertical-align: -1px; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 0 0 20px; }}
.card {{ border: 1px solid {GRID}; border-radius: 10px; padding: 12px 14px; background: #fbfcfd; }}
.card b {{ display: block; font-size: clamp(18px, 2.1vw, 22px); font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums; }}
.card span {{ color: {MUTED}; font-size: 13px; }}
.scroll {{ overflow: auto; max-height: 70vh; margin: 0 -4px; background: {_SHADOW}; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: 7px 10px; border-bottom: 1px solid {GRID}; vertical-align: top; }}
th {{ position: sticky; top: 0; background: #fff; z-index: 1; font-weight: 600; color: {MUTED}; font-size: 13px; }}
td.n, th.n {{ text-align: right; white-space: nowrap; }}
tr:last-child td {{ border-bottom: 0; }}
td code {{ font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: break-word; }}
.tag {{ display: inline-block; border-radius: 999px; padding: 1px 10px; font-size: 13px; background: #eef0f4; color: #4b5563; }}
.recompute {{ background: #e9e6fb; color: #4a3bb0; }}
.offload {{ background: #fdeedc; color: #95580c; }}
.compress {{ background: #e2f3ec; color: #17694a; }}
.bad, .card.bad b {{ color: {BUDGET}; }}
.bar {{ display: block; height: 4px; border-radius: 2px; background: #4fa3a5; margin-top: 4px; margin-left: auto; }}
@media (max-width: 640px) {{
  body {{ font-size: 14px; }}
  th, td {{ padding: 6px; }}
  th.n {{ white-space: normal; }}
  #figures td, #figures th {{ font-size: 12.5px; padding: 6px 3px; }}
  #figures td:last-child {{ white-space: normal; }}
  .cards {{ grid-template-columns: repeat(auto-fit, minmax(120px, 1fr)); gap: 8px; }}
  .card {{ padding: 9px 10px; }}
  .card b {{ font-size: 18px; }}
  .plot {{ height: 560px; }}
  .plot.half {{ height: 420px; }}
}}
"""

# Sorts a table by the column whose heading is clicked, or entered by keyboard: numbers from the most down at first, words from A.
_SORT = """
addEventListener("DOMContentLoaded", () => {
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
  };
  const sort = (table, heading) => {
    const column = heading.cellIndex, body = table.tBodies[0], rows = [...body.rows];
    const numeric = rows.some(row => row.cells[column].dataset.v !== undefined);
    const before = heading.getAttribute("aria-sort");
    const down = before ? before === "ascending" : numeric;
    table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const compare = numeric ? (a, b) => a - b : (a, b) => a.localeCompare(b, undefined, {numeric: true});
    rows.sort((a, b) => (down ? -1 : 1) * compare(key(a, column), key(b, column)));
    body.append(...rows);
  };
  document.querySelectorAll("table.sortable").forEach(table => table.querySelectorAll("th").forEach(heading => {
    heading.tabIndex = 0;
    heading.addEventListener("click", () => sort(table, heading));
    heading.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(table, heading); }
    });
  }));
});
"""
