"""Small tables in HTML, Markdown and CSV: text for notebooks, papers and spreadsheets."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from html import escape
from io import StringIO


def html_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as HTML, whatever the text holds.

    >>> html_table("a", ("b",), [("<1>",)])
    '<p>a</p><table><tr><th>b</th></tr><tr><td>&lt;1&gt;</td></tr></table>'
    """
    lines = [_html_row(head, "th"), *(_html_row(row, "td") for row in rows)]
    return f"<p>{escape(title)}</p><table>{''.join(lines)}</table>"


def _html_row(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""A table as Markdown.

    >>> print(markdown_table(("a", "b"), [("1|2", "3")]), end="")
    | a | b |
    |---|---|
    | 1\|2 | 3 |
    """
    lines = [head, ["---"] * len(head), *rows]
    text = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines]
    text[1] = "|".join(lines[1])
    return "".join(
        f"|{line}|\n" if number == 1 else f"| {line} |\n" for number, line in enumerate(text)
    )


def csv_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    r"""A table as CSV.

    >>> csv_table(("a", "b"), [("x, y", 3)])
    'a,b\n"x, y",3\n'
    """
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()
