"""Tables of a report: kernels, candidates and notes, as HTML that can be sorted and filtered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from rich.table import Table

from ucudnn.plan import KernelPlan, Plan
from ucudnn.reports.charts import short_names
from ucudnn.reports.rationale import Rationale
from ucudnn.reports.text import plan_table
from ucudnn.units import format_bytes, format_ns

# A number in a note, not one in a name such as im2col_gemm.
_NUMBER = re.compile(r"(?<![\w.])\d[\d.,]*\d?(?:e[-+]?\d+)?(?![\w])")


class Cell(NamedTuple):
    """A cell of a table.

    Args:
        text: as people read it.
        key: by which rows are sorted; None: by the text.
    """

    text: str
    key: float | None = None


def kernels_table(plan: Plan) -> str:
    """The columns that a wide terminal shows, with layers, in the plan's order."""
    table = plan_table(plan, width=200)
    heads = [*(str(column.header) for column in table.columns), "layers"]
    numbers = [column.justify == "right" for column in table.columns]
    lines = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    rows = []
    for index, (kernel, texts) in enumerate(zip(plan.kernels, lines, strict=True)):
        cells = [Cell(*both) for both in zip(texts, _keys(index, kernel), strict=True)]
        rows.append([*cells, Cell(", ".join(kernel.layers))])
    caption = f"<p>Of one call: {escape(str(table.caption))}.</p>"
    return caption + "\n" + sortable("kernels", heads, rows, [*numbers, False])


def _keys(index: int, kernel: KernelPlan) -> tuple[float | None, ...]:
    """Sort keys of the columns of `plan_table`; -1 where there is no value."""
    default, timing = kernel.default, kernel.timing
    times = (-1, -1) if default is None else (default.time_ns, default.workspace_bytes)
    gain = -1.0 if default is None else default.time_ns / timing.time_ns
    predicted = kernel.predicted_time_ns / timing.time_ns
    planned = (timing.time_ns, timing.workspace_bytes)
    calls = len(kernel.layers)
    return (index, None, calls, *times, *planned, gain, predicted, None)


def candidates_table(plan: Plan, rationales: Sequence[Rationale]) -> str:
    """The plan of each kernel and what was rejected, one row each.

    Args:
        plan: the plan.
        rationales: of its kernels, in its order.
    """
    names = short_names(plan)
    heads = ("#", "kernel", "split", "time", "of the plan's", "workspace", "error", "why not")
    rows = []
    for index, (kernel, rationale) in enumerate(zip(plan.kernels, rationales, strict=True)):
        first = [Cell(str(index), index), Cell(names[index])]
        rows += [[*first, *cells] for cells in _candidates(kernel, rationale)]
    numbers = [head in ("#", "time", "of the plan's", "workspace", "error") for head in heads]
    return sortable("candidates", heads, rows, numbers)


def _candidates(kernel: KernelPlan, rationale: Rationale) -> Iterator[list[Cell]]:
    timing = kernel.timing
    chosen = str(kernel.split(kernel.problem.batch))
    yield [
        Cell(chosen),
        *_time(timing.time_ns, not timing.is_predicted, timing.time_ns),
        Cell(format_bytes(timing.workspace_bytes), timing.workspace_bytes),
        Cell("-", -1),
        Cell("the plan"),
    ]
    for one in rationale.alternatives:
        size = one.workspace_bytes
        yield [
            Cell(str(one.split)),
            *_time(one.time_ns, one.is_measured, timing.time_ns),
            Cell("-", -1) if size is None else Cell(format_bytes(size), size),
            Cell("-", -1) if one.error is None else Cell(f"{one.error:.1e}", one.error),
            Cell(one.reason),
        ]


def _time(time_ns: int | None, is_measured: bool, plan_ns: int) -> tuple[Cell, Cell]:
    """Time, and its ratio to that of the plan."""
    if time_ns is None:
        return Cell("-", -1), Cell("-", -1)
    about = "" if is_measured else "~"
    ratio = time_ns / plan_ns
    return Cell(f"{about}{format_ns(time_ns)}", time_ns), Cell(f"{ratio:.2f}x", ratio)


def notes_list(plan: Plan) -> str:
    """Each note once, with its kernels; notes that differ only in numbers stand together."""
    kernels_by_note: dict[str, list[int]] = {}
    for index, kernel in enumerate(plan.kernels):
        for note in dict.fromkeys(kernel.remarks):
            kernels_by_note.setdefault(note, []).append(index)
    notes_by_kind: dict[str, list[str]] = {}
    for note in kernels_by_note:
        notes_by_kind.setdefault(_NUMBER.sub("…", note), []).append(note)
    items = []
    for kind, notes in notes_by_kind.items():
        if len(notes) == 1:
            (note,) = notes
            items.append(f"<li>{escape(note)} ({_kernels(kernels_by_note[note], plan)})</li>")
            continue
        count = len({index for note in notes for index in kernels_by_note[note]})
        inner = "".join(
            f"<li>{escape(note)} ({_kernels(kernels_by_note[note], plan)})</li>" for note in notes
        )
        said = f"{escape(kind)} ({count} kernels)"
        items.append(f"<li><details><summary>{said}</summary><ul>{inner}</ul></details></li>")
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _kernels(indices: Sequence[int], plan: Plan) -> str:
    if len(indices) == len(plan.kernels) and len(indices) > 1:
        return "all kernels"
    word = "kernel" if len(indices) == 1 else "kernels"
    return f"{word} {', '.join(map(str, indices))}"


def sortable(
    name: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    numbers: Sequence[bool],
) -> str:
    """A table whose rows can be sorted by a click on a heading, and filtered by text.

    Args:
        name: of the table, for the page's script.
        heads: headings.
        rows: of as many cells.
        numbers: whether the column holds numbers, which stand at its right end.
    """
    head = "".join(
        f'<th scope="col"{_class(number)}><button type="button">{escape(text)}</button></th>'
        for text, number in zip(heads, numbers, strict=True)
    )
    body = "\n".join(
        f"<tr>{''.join(_cell(*both) for both in zip(cells, numbers, strict=True))}</tr>"
        for cells in rows
    )
    return (
        f'<p class="tools"><label>Filter <input type="search" data-table="{name}"></label> '
        f'<output for="{name}"></output></p>\n'
        f'<div class="wide tall"><table id="{name}" class="sortable">'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _cell(cell: Cell, number: bool) -> str:
    key = "" if cell.key is None else f' data-key="{cell.key:.12g}"'
    return f"<td{_class(number)}{key}>{escape(cell.text)}</td>"


def _class(number: bool) -> str:
    return ' class="number"' if number else ""


def static_table(table: Table) -> str:
    """A table for a terminal as HTML, with its caption above it."""
    numbers = [column.justify == "right" for column in table.columns]
    heads = [str(column.header) for column in table.columns]
    lines = [_line("th", heads, numbers)]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        lines.append(_line("td", [*map(str, cells)], numbers))
    caption = f"<p>{escape(str(table.caption))}.</p>"
    return "\n".join([caption, '<div class="wide"><table>', *lines, "</table></div>"])


def _line(tag: str, cells: Sequence[str], numbers: Sequence[bool]) -> str:
    marked = zip(numbers, cells, strict=True)
    return f"<tr>{''.join(f'<{tag}{_class(n)}>{escape(cell)}</{tag}>' for n, cell in marked)}</tr>"
