"""Texts that terminals and spreadsheets show as they are, and tables of them as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
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
