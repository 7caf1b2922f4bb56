"""Small tables as text: in HTML for notebooks, and in CSV for spreadsheets."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from html import escape
from io import StringIO


def printable(text: str) -> str:
    r"""Text whose control characters are written out, so that no terminal or page obeys them.

    >>> print(printable("conv\x1b[2J \u202e"), printable("größe"))
    conv\x1b[2J \u202e größe
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def html_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as HTML; special characters in its texts are escaped.

    >>> html_table("a", ("b",), [("<1>",)])
    '<p>a</p><table><tr><th>b</th></tr><tr><td>&lt;1&gt;</td></tr></table>'
    """
    lines = [_html_row(head, "th"), *(_html_row(row, "td") for row in rows)]
    return f"<p>{escape(title)}</p><table>{''.join(lines)}</table>"


def _html_row(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def csv_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    r"""A table as CSV; a text that a spreadsheet would run as a formula gets a leading apostrophe.

    >>> csv_table(("a", "b"), [("x, y", 3), ("=1+1", None)])
    'a,b\n"x, y",3\n\'=1+1,\n'
    """
    text = StringIO()
    cells = ([_csv_cell(cell) for cell in row] for row in (head, *rows))
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue()


def _csv_cell(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    return f"'{printable(cell)}" if cell.startswith(("=", "+", "-", "@")) else printable(cell)
