"""A plan as one HTML file: totals, charts, what was rejected, and tables.

The file contains plotly's script, so it needs no other file and no network. plotly is optional and
imported only by `report`; the figures are plain values until then. Every number is from the plan or
from the measurements that are handed in, and a predicted time is never drawn like a measured one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ucudnn.errors import UcudnnError
from ucudnn.plan import Plan
from ucudnn.reports.charts import Chart, charts, rows_of
from ucudnn.reports.fronts import front_chart
from ucudnn.reports.look import FONT, SCRIPT, STYLE
from ucudnn.reports.rationale import Rationale
from ucudnn.reports.rows import plan_csv
from ucudnn.reports.tables import candidates_table, kernels_table, notes_list, static_table
from ucudnn.reports.text import layout_table, plan_summary, plan_verdict
from ucudnn.reports.timeline import timeline_chart
from ucudnn.reports.totals import cards
from ucudnn.system.files import write
from ucudnn.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

# More kernels than this are drawn in a box that scrolls.
_MOST_ROWS = 18
_HEADING = re.compile(r'<h2 id="[^"]*">([^<]*)</h2>')
# How to get what a plan does not have, in its place.
_MISSING = {
    "Splits": "All kernels are torch's own convolutions, undivided.",
    "Timeline": "What is allocated at each convolution is known of a plan with a memory budget: "
    "ucudnn tune MODEL --memory-budget 8GiB.",
    "Curve": "The time of the whole network for every size of the memory is known of a plan that "
    "was tuned with it: ucudnn tune MODEL --curve.",
    "Fronts": "The cache has no measurements of this plan's machine, versions and threads, so that "
    "only the plan and torch's default are known: draw the report where the plan was tuned, or "
    "name the cache: ucudnn report PLAN --cache FOLDER.",
    "Layout": "Steps in channels_last were not compared with this plan: "
    "ucudnn tune MODEL --layout auto plans both.",
}


def report(
    plan: Plan, rationales: Sequence[Rationale] | None = None, remarks: Sequence[str] = ()
) -> str:
    """Draw a plan as one HTML page that loads nothing from elsewhere.

    >>> page = report(Plan.load("resnet18.plan.json"))  # doctest: +SKIP

    Args:
        plan: to draw.
        rationales: what else is known of its kernels, in their order; None: nothing.
        remarks: further sentences for the top.

    Raises:
        UcudnnError: plotly is not installed.
    """
    try:
        from plotly.io import to_html
    except ImportError as error:
        missing = "plotly, which draws reports, is not installed; run: pip install plotly"
        raise UcudnnError(missing) from error
    count = len(plan.kernels)
    known = tuple(rationales or ()) or (Rationale(),) * count
    if not count:
        return _page(plan, ["<p>The plan has no kernels.</p>", *_layout(plan)], remarks)
    figures = _Figures(to_html)
    return _page(plan, [*_charts(plan, figures), *_why(plan, known, figures)], remarks)


def write_report(
    plan: Plan,
    path: str | os.PathLike[str],
    rationales: Sequence[Rationale] | None = None,
    remarks: Sequence[str] = (),
) -> None:
    """Write the report of a plan; readers see the old file or the new one, never a part.

    Args:
        plan: to draw.
        path: of the file.
        rationales: as for `report`.
        remarks: as for `report`.

    Raises:
        PlanError: the file cannot be written.
        UcudnnError: plotly is not installed.
    """
    # names from a plan file may hold half a surrogate pair, which UTF-8 cannot
    text = report(plan, rationales, remarks)
    write(path, text.encode(errors="xmlcharrefreplace"), "the report")


class _Figures:
    """Draws figures, with plotly's script in the first one.

    Args:
        to_html: plotly's function.
    """

    def __init__(self, to_html: Callable[..., str]) -> None:
        self._to_html = to_html
        self._has_script = False

    def draw(self, chart: Chart) -> str:
        """A chart as HTML, transparent: the page has the background."""
        drawn = self._to_html(
            {"data": chart.traces, "layout": _transparent(chart)},
            # plotly 7 shows a button that would send the plan to a server of theirs
            config={"displaylogo": False, "showSendToCloud": False},
            include_plotlyjs=not self._has_script,  # once
            full_html=False,
            validate=False,  # the figures are ours; the tests validate them
            div_id=chart.name,  # a random one would make each report of a plan another file
        )
        self._has_script = True
        return drawn


def _transparent(chart: Chart) -> dict[str, Any]:
    clear = "rgba(0,0,0,0)"
    # In the letters of the page.
    clear_background = {"paper_bgcolor": clear, "plot_bgcolor": clear}
    return {**chart.layout, **clear_background, "font": {"family": FONT}}


def _section(heading: str, *parts: str) -> str:
    return "\n".join([f'<h2 id="{_anchor(heading)}">{heading}</h2>', *parts])


def _anchor(heading: str) -> str:
    # Charts have their own names as identifiers.
    return f"to-{heading.lower().replace(' ', '-')}"


def _contents(sections: Sequence[str]) -> str:
    """Links to the sections of the page."""
    headings = [heading for part in sections for heading in _HEADING.findall(part)]
    links = (f'<a href="#{_anchor(heading)}">{heading}</a>' for heading in headings)
    return f"<nav>{' '.join(links)}</nav>"


def _download(plan: Plan) -> str:
    """Link that saves the kernels as CSV; the file is inside the page."""
    # Half a surrogate pair, which a plan file may hold, has no UTF-8.
    text = quote(plan_csv(plan).encode(errors="backslashreplace"))
    return f'<a download="kernels.csv" href="data:text/csv;charset=utf-8,{text}">Save as CSV</a>'


def _missing(heading: str) -> str:
    return f'<p class="under">{escape(_MISSING[heading])}</p>'


def _charts(plan: Plan, figures: _Figures) -> Iterator[str]:
    """The charts of all kernels and of the step."""
    found = {chart.name: chart for chart in charts(plan)}
    timeline = timeline_chart(plan)
    if timeline is not None:
        found["Timeline"] = timeline
    by_row = ("Times", "Workspaces", "Splits")
    for name in (*by_row, "Timeline", "Curve"):
        if name not in found:
            yield _section(name, _missing(name))
            continue
        # A row for each kernel: as much as all other sections together, where there are many.
        is_tall = name in by_row and len(plan.kernels) > _MOST_ROWS
        box = f'<div class="{"tall" if is_tall else "chart"}">{figures.draw(found[name])}</div>'
        caption = found[name].caption + " Scroll in the frame to see all." * is_tall
        yield _section(name, f"<p>{escape(caption)}</p>", box)
    yield from _layout(plan)


def _layout(plan: Plan) -> Iterator[str]:
    """The contestants of a race of layouts; the verdict at the top has the outcome."""
    if plan.layout_race is not None and plan.layout_race.contestants:
        yield _section("Layout", static_table(layout_table(plan.layout_race)))
    elif plan.layout_race is None and plan.layout_hint is None:
        yield _section("Layout", _missing("Layout"))


def _why(plan: Plan, rationales: Sequence[Rationale], figures: _Figures) -> Iterator[str]:
    """Time over workspace of one kernel at a time, and the candidates of all."""
    rows = rows_of(plan)
    drawn = {row.number: front_chart(plan, row, rationales[row.number]) for row in rows}
    values = {
        index: {"data": chart.traces, "layout": _transparent(chart)}
        for index, chart in drawn.items()
    }
    # Names come from a plan file: none may end the script.
    text = json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")
    first = drawn[rows[0].number]
    options = "".join(f'<option value="{row.number}">{row.label}</option>' for row in rows)
    chooser = (
        f'<p class="tools"><label>Kernel <select id="kernel" autocomplete="off">{options}'
        '<option value="">all</option></select></label></p>'
    )
    yield _section(
        "Why these splits",
        "" if any(one.front for one in rationales) else _missing("Fronts"),
        chooser,
        f"<p>{escape(first.caption)}</p>",
        figures.draw(first),
        f'<script type="application/json" id="fronts">{text}</script>',
        "<p>The plan of the kernel and the best of what was rejected, by the cache's measurements. "
        "~: the sum of chunks, not timed as a call. A heading sorts.</p>",
        candidates_table(plan, rationales),
    )


def _page(plan: Plan, parts: Sequence[str], remarks: Sequence[str]) -> str:
    title = _title(plan)
    sentences = [*plan_verdict(plan), *remarks]
    verdict = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    facts = "".join(
        f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in _facts(plan).items() if value
    )
    notes = notes_list(plan)
    sections = [*parts, _section("All kernels", kernels_table(plan), f"<p>{_download(plan)}</p>")]
    sections += [_section("Notes", notes)] if notes else []
    lines = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}: ucudnn plan {plan.hash[:8]}</title>",
        f"<style>{STYLE}</style>\n</head>\n<body>",
        f'<h1>{escape(title)}</h1>\n<p class="under">{escape(_subtitle(plan))}</p>',
        cards(plan),
        f"<p>{escape(plan_summary(plan))}</p>",
        f"<ul>{verdict}</ul>" if verdict else "",
        f"<details><summary>How and for what it was made</summary><dl>{facts}</dl></details>",
        _contents(sections),
        *sections,
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n",
    )
    return "\n".join(line for line in lines if line)


def _title(plan: Plan) -> str:
    return (plan.origin.model if plan.origin else "") or "ucudnn plan"


def _subtitle(plan: Plan) -> str:
    origin = plan.origin
    about = [] if origin is None else [*origin.inputs, f"planned {origin.made}" * bool(origin.made)]
    return " · ".join(filter(None, [*about, str(plan.device), f"torch {plan.software.torch}"]))


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
        "pool": "" if total is None else f"{format_bytes(total)}, every call owns its part",
        "policy": plan.config.policy,
        "ops": ", ".join(plan.config.ops),
        "demands": ", ".join(plan.config.switches),
        "tuning": "" if plan.origin is None else str(plan.origin),
        "plan": plan.hash,
    }
