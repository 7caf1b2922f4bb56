"""A plan as one HTML file: charts of times, workspaces and splits, and a table.

The file contains plotly's script, so it needs no other file and no network. plotly is optional and
imported only by `report`; the figures are plain values until then. Every number is from the plan,
and a predicted time is never drawn like a measured one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape

from rich.table import Table

from ucudnn.errors import UcudnnError
from ucudnn.plan import Plan
from ucudnn.reports.charts import charts
from ucudnn.reports.text import as_sentence, layout_table, plan_summary, plan_table
from ucudnn.system.files import write
from ucudnn.units import format_bytes

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1280px; padding: 0 1em }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1em 1.2em }
dt { color: #555 } dd { margin: 0; overflow-wrap: anywhere }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 12px }
th, td { border-bottom: 1px solid #ddd; padding: .25em .6em; text-align: left; vertical-align: top }
td.number, th.number { text-align: right } td:nth-child(-n+9) { white-space: nowrap }
"""


def report(plan: Plan) -> str:
    """Draw a plan as one HTML page that loads nothing from elsewhere.

    >>> page = report(Plan.load("resnet18.plan.json"))  # doctest: +SKIP

    Raises:
        UcudnnError: plotly is not installed.
    """
    try:
        from plotly.io import to_html
    except ImportError as error:
        missing = "plotly, which draws reports, is not installed; run: pip install plotly"
        raise UcudnnError(missing) from error
    drawn: list[str] = []
    for chart in charts(plan) if plan.kernels else ():
        figure = to_html(
            {"data": chart.traces, "layout": chart.layout},
            # plotly 7 shows a button that would send the plan to a server of theirs
            config={"displaylogo": False, "showSendToCloud": False},
            include_plotlyjs=not drawn,  # once
            full_html=False,
            validate=False,  # the figures are ours; the tests validate them
            div_id=chart.name,  # a random one would make each report of a plan another file
        )
        drawn.append(f"<h2>{chart.name}</h2>\n<p>{escape(chart.caption)}</p>\n{figure}")
    return _page(plan, drawn or ["<p>The plan has no kernels.</p>"])


def write_report(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the report of a plan; readers see the old file or the new one, never a part.

    Raises:
        PlanError: the file cannot be written.
        UcudnnError: plotly is not installed.
    """
    # names from a plan file may hold half a surrogate pair, which UTF-8 cannot
    write(path, report(plan).encode(errors="xmlcharrefreplace"), "the report")


def _page(plan: Plan, drawn: Sequence[str]) -> str:
    head = f'<meta charset="utf-8">\n<title>ucudnn plan {plan.hash[:12]}</title>'
    parts = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n<style>{_STYLE}</style>\n</head>',
        "<body>\n<h1>ucudnn plan</h1>\n<dl>",
        # a CPU has no driver
        *(
            f"<dt>{name}</dt><dd>{escape(value)}</dd>"
            for name, value in _facts(plan).items()
            if value
        ),
        f"</dl>\n<p>{escape(plan_summary(plan))}</p>",
        *_layouts(plan),
        *drawn,
        f"<h2>All kernels</h2>\n{_html_table(plan)}\n</body>\n</html>\n",
    )
    return "\n".join(parts)


def _facts(plan: Plan) -> dict[str, str]:
    limit, total, memory = plan.config.limit_bytes, plan.config.total_bytes, plan.memory
    return {
        "device": str(plan.device),
        "threads": str(plan.conditions.threads or ""),
        "malloc": plan.conditions.allocator,
        **{name: str(version) for name, version in asdict(plan.software).items()},
        "backend": plan.backend,
        "memory format": "" if plan.memory_format == "keep" else plan.memory_format,
        "workspace limit": "none" if limit is None else f"{format_bytes(limit)} for each kernel",
        "memory budget": "" if memory is None else format_bytes(memory.budget_bytes),
        "memory": "" if memory is None else as_sentence(str(memory)),
        "pool": "" if total is None else f"{format_bytes(total)}, every call owns its part",
        "policy": plan.config.policy,
        "ops": ", ".join(plan.config.ops),
        "demands": ", ".join(plan.config.switches),
        "plan": plan.hash,
    }


def _html_table(plan: Plan) -> str:
    """The columns that a wide terminal shows, in the plan's order, with layers and notes."""
    more = [(", ".join(kernel.layers), "; ".join(kernel.remarks)) for kernel in plan.kernels]
    return _html_of(plan_table(plan, width=200), "Of one call: ", ("layers", "notes"), more)


def _layouts(plan: Plan) -> Iterator[str]:
    """How the layout of the model was decided, where the settings asked for that."""
    if plan.layout_hint is not None:
        yield f"<h2>Layout</h2>\n<p>{escape(as_sentence(str(plan.layout_hint)))}</p>"
    if plan.layout_race is None:
        return
    yield f"<h2>Layout</h2>\n<p>{escape(as_sentence(str(plan.layout_race)))}</p>"
    if plan.layout_race.contestants:
        yield _html_of(layout_table(plan.layout_race))


def _html_of(
    table: Table,
    of: str = "",
    more_heads: Sequence[str] = (),
    more: Sequence[Sequence[str]] | None = None,
) -> str:
    """A table for a terminal, with further columns."""
    numbers = [column.justify == "right" for column in table.columns] + [False] * len(more_heads)
    heads = [*(str(column.header) for column in table.columns), *more_heads]
    lines = [_html_row("th", heads, numbers)]
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    for cells, others in zip(rows, more or [()] * len(rows), strict=True):
        lines.append(_html_row("td", [*map(str, cells), *others], numbers))
    caption = f"<p>{of}{escape(str(table.caption))}.</p>"
    return "\n".join([caption, '<div class="wide"><table>', *lines, "</table></div>"])


def _html_row(tag: str, cells: Sequence[str], numbers: Sequence[bool]) -> str:
    starts = (f'{tag} class="number"' if number else tag for number in numbers)
    marked = zip(starts, cells, strict=True)
    return f"<tr>{''.join(f'<{start}>{escape(cell)}</{tag}>' for start, cell in marked)}</tr>"
