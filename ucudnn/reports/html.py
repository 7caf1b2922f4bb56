"""A plan as one HTML page: its totals, the ways to run a step, and every kernel.

The page contains plotly's script, so it needs no other file and no network. plotly is optional; it
is imported only when a report is drawn.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from rich.table import Table

from ucudnn.errors import UcudnnError
from ucudnn.kernels.rationale import Rationale
from ucudnn.plan import KernelPlan, Plan
from ucudnn.reports.cards import cards
from ucudnn.reports.charts import Chart, kernel_chart, ways_chart
from ucudnn.reports.text import (
    as_sentence,
    kernel_name,
    layout_table,
    plan_table,
    plan_title,
    plan_verdict,
    ways_of,
    ways_table,
)
from ucudnn.system.files import write
from ucudnn.system.markup import printable

_NO_FRONT = (
    "The cache has no measurements of this plan's machine, versions and threads, so that only the "
    "plan and torch's default are known: draw the report where the plan was tuned, or name the "
    "cache: `ucudnn report PLAN --cache FOLDER`."
)
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1a1a1a; --faint: #5c5c5c; --line: #ddd;
  --card: #f5f6f8 }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --text: #e8e8e8; --faint: #a6a6a6;
  --line: #3a3d44; --card: #20242a } }
* { box-sizing: border-box }
body { font: 14px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1320px;
  padding: 1.5em 1em 4em; background: var(--page); color: var(--text); overflow-wrap: anywhere }
h1 { margin: 0; font-size: clamp(1.3rem, 5vw, 2rem) }
h2 { margin: 2em 0 .3em } p { margin: .4em 0 }
.under { color: var(--faint) }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: .8em;
  margin: 1em 0 }
.cards > div { background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .7em .9em }
.cards b { display: block; font-size: 1.1em; font-weight: 600 }
.cards span { color: var(--faint) }
ul { margin: .4em 0; padding-left: 1.3em }
select { font: inherit; max-width: 100% }
.tall { max-height: 48rem; overflow: auto; border: 1px solid var(--line); border-radius: 6px;
  margin: .6em 0; width: fit-content; max-width: 100% }
@media print { .tall { max-height: none } }
table { border-collapse: collapse; font-size: 12px; overflow-wrap: normal }
th, td { border-bottom: 1px solid var(--line); padding: .25em .6em; text-align: left;
  vertical-align: top; min-width: 4em }
#kernels td:not(.number) { min-width: 16em }
th { position: sticky; top: 0; background: var(--page) }
.number { text-align: right; font-variant-numeric: tabular-nums }
td.number { white-space: nowrap }
.js-plotly-plot .main-svg text { fill: var(--text) !important }
.js-plotly-plot .hoverlayer text { fill: #111 !important }
"""
# Without showSendToCloud, plotly 7 would show a button that sends the plan to plotly's server.
_SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const settings = {displaylogo: false, responsive: true, showSendToCloud: false};
function draw(chart, place) { Plotly.react(chart, ...figures[chart][place], settings); }
Object.keys(figures).forEach(chart => draw(chart, 0));
"""


def report(plan: Plan, rationales: Sequence[Rationale] | None = None) -> str:
    """Draw a plan as one HTML page that loads nothing from elsewhere."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        missing = "plotly, which draws reports, is not installed; run: pip install plotly"
        raise UcudnnError(missing) from error
    # The kernels with the longest calls by torch's own convolution come first.
    known = rationales or [Rationale()] * len(plan.kernels)
    kernels = sorted(zip(range(len(plan.kernels)), plan.kernels, known, strict=True), key=_order)
    figures = {"kernel": [kernel_chart(plan, one, rationale) for _, one, rationale in kernels]}
    ways = ways_of(plan)
    if plan.memory is not None and len(ways) > 1:
        figures["ways"] = [ways_chart(ways, plan.memory.budget_bytes)]
    labels = [f"{number}  {kernel_name(one.problem)}" for number, one, _ in kernels]
    sections = [*_ways(plan, "ways" in figures), *_kernels(plan, labels)]
    if kernels and not any(rationale.front for rationale in known):
        sections.append(f'<p class="under">{_sentence(_NO_FRONT)}</p>')
    return _page(plan, [*sections, *_scripts(figures, get_plotlyjs())])


def _order(entry: tuple[int, KernelPlan, Rationale]) -> int:
    kernel = entry[1]
    return -(kernel.default or kernel.timing).time_ns * len(kernel.layers)


def write_report(
    plan: Plan, path: str | os.PathLike[str], rationales: Sequence[Rationale] | None = None
) -> None:
    """Write the report of a plan; readers see the old file or the new one, never a part."""
    write(path, report(plan, rationales).encode(), "the report")


def _text(text: str) -> str:
    """Escape text for the page, because names come from a plan file, which may hold anything."""
    return escape(printable(text))


def _sentence(text: str) -> str:
    """Escape a sentence; what stands between backticks is shown as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(text))


def _ways(plan: Plan, is_drawn: bool) -> Iterator[str]:
    """Section with the ways to run a step that were foreseen, run or raced."""
    tables = {}
    if ways := ways_of(plan):
        tables["ways-table"] = ways_table(ways)
    layouts = plan.layout_race
    if layouts is not None and layouts.ways and not layouts.is_fixed:
        tables["layout"] = layout_table(layouts)
    if not tables:
        return
    yield "<h2>Ways to run a step</h2>"
    for name, table in tables.items():
        yield f"<p>{_text(as_sentence(str(table.caption)))}</p>"
        yield _table(name, table)
    if is_drawn:
        yield (
            "<p>Each mark is a step that was run, as a large dot, or foreseen. Further left is "
            'less memory, further down is faster.</p>\n<div id="ways"></div>'
        )


def _kernels(plan: Plan, labels: Sequence[str]) -> Iterator[str]:
    """Sections with a table of all kernels and their layers, and with a chart of one kernel."""
    if not plan.kernels:
        yield "<p>The plan has no kernels.</p>"
        return
    table = plan_table(plan, width=200)
    layers = [", ".join(dict.fromkeys(kernel.layers)) for kernel in plan.kernels]
    options = "".join(
        f'<option value="{place}">{_text(label)}</option>' for place, label in enumerate(labels)
    )
    yield "<h2>All kernels</h2>"
    yield f"<p>Of one call: {_text(str(table.caption))}.</p>"
    yield _table("kernels", table, layers=layers)
    yield (
        "<h2>Time over workspace of a kernel</h2>\n"
        "<p>The line is the front: the least sum of chunks that were timed in full, for every "
        "limit. Filled marks are whole calls, timed; open ones are predicted. Marks say what they "
        "are, and why the plan is another. 0 B stands at the left end of the logarithmic axis. "
        "Very slow splits are above the chart; a double click shows all.</p>"
        f"\n<select onchange=\"draw('kernel', this.value)\">{options}</select>\n"
        '<div id="kernel"></div>'
    )


def _scripts(figures: dict[str, list[Chart]], plotly: str) -> Iterator[str]:
    """plotly's script, the figures as JSON, and the script that draws the first ones."""
    # In JSON, "<" can be written in another way, which no browser takes for the end of the script.
    drawn = {name: charts for name, charts in figures.items() if charts}
    data = json.dumps(drawn, separators=(",", ":")).replace("<", "\\u003c")
    yield f"<script>{plotly}</script>"
    yield f'<script type="application/json" id="figures">{data}</script>'
    yield f"<script>{_SCRIPT}</script>"


def _table(name: str, table: Table, **more: Iterable[str]) -> str:
    """Convert a terminal's table to HTML, without title and caption; add the columns `more`."""
    heads = [*(column.header for column in table.columns), *more]
    columns = [*(column.cells for column in table.columns), *more.values()]
    marks = [' class="number"' if one.justify == "right" else "" for one in table.columns]
    marks += [""] * len(more)

    def line(tag: str, cells: Iterable[object]) -> str:
        marked = zip(marks, cells, strict=True)
        inner = "".join(f"<{tag}{mark}>{_text(str(cell))}</{tag}>" for mark, cell in marked)
        return f"<tr>{inner}</tr>"

    rows = "\n".join(line("td", cells) for cells in zip(*columns, strict=True))
    head = line("th", heads)
    return (
        f'<div class="tall"><table id="{name}"><thead>{head}</thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _page(plan: Plan, sections: Sequence[str]) -> str:
    title = _text((plan.origin.model if plan.origin else "") or "ucudnn plan")
    about = [plan_title(plan), *([] if plan.origin is None else [str(plan.origin)])]
    head = "".join(f'<p class="under">{_text(line)}</p>\n' for line in about)
    totals = "".join(
        f"<div>{card.name}<b>{_text(card.value)}</b><span>{_sentence(card.note)}</span></div>"
        for card in cards(plan)
    )
    sentences = "".join(f"<li>{_sentence(sentence)}</li>" for sentence in plan_verdict(plan))
    lines = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}: ucudnn plan {plan.hash[:8]}</title>",
        f"<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{title}</h1>\n{head}<p>torch's own → this plan</p>",
        f'<div class="cards">{totals}</div>\n<ul>{sentences}</ul>',
        *sections,
        "</body>\n</html>\n",
    )
    return "\n".join(lines)
