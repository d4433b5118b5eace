"""The tables of a comparison for papers and notes: LaTeX (booktabs) and Markdown (GitHub's tables)."""

from __future__ import annotations

from prl.compare.ranking import Comparison
from prl.compare.table import Table, counts_line, footnotes, group_table, has_groups, point_table

LATEX = {  # what LaTeX takes for itself
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "≥": r"$\geq$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip
PREAMBLE = r"% in the preamble: \usepackage{booktabs} \usepackage{graphicx}"
FITTED = (
    r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"  # no wider than the text, and never enlarged
)
MARKDOWN = {"\\": "\\\\", "|": "\\|", "*": "\\*", "_": "\\_", "<": "&lt;", "`": "\\`"}


def render_markdown(comparison: Comparison) -> str:
    """Groups, if there are any, and points, with all notes."""
    parts = [f"## {_markdown(counts_line(comparison))}", *map(_markdown_table, _tables(comparison))]
    notes = [f"* {_markdown(note)}" for note in footnotes(comparison)]
    return "\n\n".join([*parts, "\n".join(notes)]).rstrip() + "\n"


def render_latex(comparison: Comparison) -> str:
    """As `render_markdown`: a table environment for each, shrunk to the width of the text where it is wider."""
    notes = [f"% {note}" for note in footnotes(comparison)]
    caption = _latex(counts_line(comparison))
    return "\n".join([PREAMBLE, *(_latex_table(table, caption) for table in _tables(comparison)), *notes]) + "\n"


def _tables(comparison: Comparison) -> list[Table]:
    return [*([group_table(comparison)] if has_groups(comparison) else []), point_table(comparison)]


def _is_numeric(table: Table) -> list[bool]:
    columns = range(len(table.headings))
    return [all(row[i].is_number or not row[i].text for row in table.rows) for i in columns]


def _markdown_table(table: Table) -> str:
    rule = ["---:" if numeric else "---" for numeric in _is_numeric(table)]
    rows = [table.headings, *([cell.text for cell in row] for row in table.rows)]
    lines = [[_markdown(text) for text in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def _latex_table(table: Table, caption: str) -> str:
    columns = "".join("r" if numeric else "l" for numeric in _is_numeric(table))
    rows = [table.headings, *([cell.text for cell in row] for row in table.rows)]
    head, *body = [" & ".join(map(_latex, row)) + r" \\" for row in rows]
    begin = [r"\begin{table}", r"\centering", FITTED, rf"\begin{{tabular}}{{{columns}}}"]
    end = [r"\end{tabular}%", "}"]
    lines = [*begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", *end]
    return "\n".join([*lines, rf"\caption{{{caption}}}", r"\end{table}"])


def _markdown(text: str) -> str:
    return "".join(MARKDOWN.get(letter, letter) for letter in text)


def _latex(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)
