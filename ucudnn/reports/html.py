"""A plan as one HTML page: totals, charts, rejected splits with reasons, and every kernel.

The page contains plotly's script, so it needs no other file and no network. plotly is optional; it
is imported only when a report is drawn.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from html import escape

from rich.table import Table

from ucudnn.errors import UcudnnError
from ucudnn.kernels.rationale import Alternative, Rationale
from ucudnn.plan import Plan
from ucudnn.reports.charts import Chart, charts, fronts_chart, rows_of, short_names
from ucudnn.reports.text import layout_table, plan_summary, plan_table, plan_verdict
from ucudnn.system.files import write
from ucudnn.system.markup import printable
from ucudnn.units import format_bytes, format_ns

_HEADING = re.compile(r'<h2 id="([^"]*)">([^<]*)</h2>')
# For each heading of a section, the text that is shown if the plan lacks the section's values. The
# text says why the values are missing, or how to get them.
_MISSING = {
    "Memory and time": "Other ways to run a step are tried if a memory budget asks for less memory "
    "than a step by torch needs: ucudnn tune MODEL --memory-budget 50%.",
    "Splits": "All kernels are torch's own convolutions, undivided.",
    "Timeline": "What is allocated at each convolution is known of a plan with a memory budget: "
    "ucudnn tune MODEL --memory-budget 8GiB.",
    "Fronts": "The cache has no measurements of this plan's machine, versions and threads, so that "
    "only the plan and torch's default are known: draw the report where the plan was tuned, or "
    "name the cache: ucudnn report PLAN --cache FOLDER.",
    "Layout": "Steps in channels_last were not compared with this plan: "
    "ucudnn tune MODEL --layout auto plans both.",
}
_FONT = "system-ui, sans-serif"
_STYLE = f"""
:root {{ color-scheme: light dark; --page: #fff; --text: #1a1a1a; --faint: #5c5c5c; --line: #ddd;
  --card: #f5f6f8; --mark: #0067a5 }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #16181c; --text: #e8e8e8; --faint: #a6a6a6;
  --line: #3a3d44; --card: #20242a; --mark: #6cb6f0 }} }}
* {{ box-sizing: border-box }}
body {{ font: 14px/1.5 {_FONT}; margin: 0 auto; max-width: 1320px;
  padding: 1.5em 1em 4em; background: var(--page); color: var(--text) }}
h1 {{ margin: 0; overflow-wrap: anywhere; font-size: clamp(1.3rem, 5vw, 2rem) }}
h2 {{ margin: 2em 0 .3em }} p {{ margin: .4em 0 }}
.under {{ color: var(--faint) }} a {{ color: var(--mark) }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: .8em;
  margin: 1em 0 }}
.cards > div {{ background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .7em .9em }}
.cards b {{ display: block; font-size: 1.2em; font-weight: 600 }}
.cards span {{ color: var(--faint) }}
ul {{ margin: .4em 0; padding-left: 1.3em }} summary {{ cursor: pointer }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .1em 1.2em }}
dt {{ color: var(--faint) }} dd {{ margin: 0; overflow-wrap: anywhere }}
nav {{ display: flex; flex-wrap: wrap; gap: .2em 1em; margin: 1em 0 }}
.wide {{ overflow-x: auto }}
.tall {{ max-height: 48rem; overflow: auto; border: 1px solid var(--line); border-radius: 6px }}
@media print {{ .tall {{ max-height: none }} }}
table {{ border-collapse: collapse; font-size: 12px }}
th, td {{ border-bottom: 1px solid var(--line); padding: .25em .6em; text-align: left;
  vertical-align: top; min-width: 4em }}
.tall th {{ position: sticky; top: 0; background: var(--page); white-space: nowrap }}
td.number, th.number {{ text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums }}
.js-plotly-plot .main-svg text {{ fill: var(--text) !important }}
.js-plotly-plot .hoverlayer text, .js-plotly-plot .updatemenu-container text {{
  fill: #111 !important }}
.js-plotly-plot .main-svg text.bartext-inside {{ fill: #111 !important }}
"""


def report(plan: Plan, rationales: Sequence[Rationale] | None = None) -> str:
    """Draw a plan as one HTML page that loads nothing from elsewhere."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        missing = "plotly, which draws reports, is not installed; run: pip install plotly"
        raise UcudnnError(missing) from error
    known = tuple(rationales or ()) or (Rationale(),) * len(plan.kernels)
    sections = [*_layout(plan)]
    if plan.kernels:
        script = f"<script>{get_plotlyjs()}</script>"
        sections = [script, *_charts(plan), *sections, _why(plan, known)]
    else:
        sections = ["<p>The plan has no kernels.</p>", *sections]
    return _page(plan, [*sections, *_kernels(plan), *_notes(plan)])


def write_report(
    plan: Plan, path: str | os.PathLike[str], rationales: Sequence[Rationale] | None = None
) -> None:
    """Write the report of a plan; readers see the old file or the new one, never a part."""
    write(path, report(plan, rationales).encode(), "the report")


def _text(text: str) -> str:
    """Escape text for the page, because names come from a plan file, which may hold anything."""
    return escape(printable(text))


def _drawn(chart: Chart) -> str:
    """Draw a chart as HTML, for a page that has plotly's script."""
    from plotly.io import to_html

    # Charts have a transparent background and the font of the page.
    clear = dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)")
    figure: str = to_html(
        {"data": chart.traces, "layout": {**chart.layout, **clear, "font": {"family": _FONT}}},
        # Without these settings, plotly 7 would show a button that sends the plan to plotly's
        # server.
        config={"displaylogo": False, "showSendToCloud": False},
        include_plotlyjs=False,
        full_html=False,
        validate=False,  # the tests validate the figures
        div_id=chart.name,  # random ids would make two reports of a plan differ
    )
    return figure


def _section(heading: str, *parts: str) -> str:
    # The HTML id of a chart is its name. The prefix makes sure that no section has the same id.
    anchor = f"to-{heading.lower().replace(' ', '-')}"
    return "\n".join([f'<h2 id="{anchor}">{heading}</h2>', *parts])


def _missing(heading: str) -> str:
    return f'<p class="under">{escape(_MISSING[heading])}</p>'


def _charts(plan: Plan) -> Iterator[str]:
    found = {chart.name: chart for chart in charts(plan)}
    for name in ("Memory and time", "Times", "Workspaces", "Splits", "Timeline"):
        if name not in found:
            yield _section(name, _missing(name))
            continue
        # With many kernels, a chart with a row per kernel would be longer than all other sections,
        # so its box scrolls.
        box = "tall" if name in ("Times", "Workspaces", "Splits") else "wide"
        figure = f'<div class="{box}">{_drawn(found[name])}</div>'
        yield _section(name, f"<p>{escape(found[name].caption)}</p>", figure)


def _layout(plan: Plan) -> Iterator[str]:
    """Section with all ways of a race of layouts; the top of the page names the winner."""
    if plan.layout_race is None:
        yield _section("Layout", _missing("Layout"))
    elif plan.layout_race.ways and not plan.layout_race.is_fixed:
        table = layout_table(plan.layout_race)
        yield _section("Layout", f"<p>{_text(str(table.caption))}.</p>", _table("layout", table))


def _why(plan: Plan, rationales: Sequence[Rationale]) -> str:
    """Section with a chart of one kernel's front, and a table of chosen and rejected splits."""
    chart, names = fronts_chart(plan, rationales), short_names(plan)
    table = Table("#", "kernel", "split", "time", "workspace", "error", "why not")
    for heading in (0, 3, 4, 5):
        table.columns[heading].justify = "right"
    for row in rows_of(plan):
        timing, known = row.kernel.timing, rationales[row.number].alternatives
        plans = Alternative(
            row.split,
            timing.time_ns,
            timing.workspace_bytes,
            error=None,
            is_measured=not timing.is_predicted,
            reason="the plan",
        )
        for one in (plans, *known):
            table.add_row(str(row.number), names[row.number], *one.cells)
    return _section(
        "Why these splits",
        "" if any(one.front for one in rationales) else _missing("Fronts"),
        f"<p>{escape(chart.caption)} The list on top of the chart has the other kernels.</p>",
        f'<div class="wide">{_drawn(chart)}</div>',
        "<p>The plan of each kernel and the best of what was rejected, by the cache's "
        "measurements. ~: the sum of chunks, not timed as a call.</p>",
        _table("candidates", table),
    )


def _kernels(plan: Plan) -> Iterator[str]:
    """Section with a table of all kernels and their layers, in the plan's order."""
    table = plan_table(plan, width=200)
    layers = [", ".join(dict.fromkeys(kernel.layers)) for kernel in plan.kernels]
    yield _section(
        "All kernels",
        f"<p>Of one call: {_text(str(table.caption))}.</p>",
        _table("kernels", table, layers=layers),
    )


def _notes(plan: Plan) -> Iterator[str]:
    """Section with each note and the kernels that have it."""
    kernels_by_note: dict[str, list[int]] = {}
    for index, kernel in enumerate(plan.kernels):
        for note in dict.fromkeys(kernel.remarks):
            kernels_by_note.setdefault(note, []).append(index)
    if kernels_by_note:
        notes = (f"{note} ({_named(of, plan)})" for note, of in kernels_by_note.items())
        yield _section("Notes", f'<div class="tall"><ul>{_items(notes)}</ul></div>')


def _items(texts: Iterable[str]) -> str:
    return "".join(f"<li>{_text(text)}</li>" for text in texts)


def _named(indices: Sequence[int], plan: Plan) -> str:
    if len(indices) == len(plan.kernels) > 1:
        return "all kernels"
    word = "kernel" if len(indices) == 1 else "kernels"
    return f"{word} {', '.join(map(str, indices))}"


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
    facts = "".join(
        f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in _facts(plan).items() if value
    )
    headings = [found for part in sections for found in _HEADING.findall(part)]
    links = " ".join(f'<a href="#{anchor}">{heading}</a>' for anchor, heading in headings)
    lines = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}: ucudnn plan {plan.hash[:8]}</title>",
        f"<style>{_STYLE}</style>\n</head>\n<body>",
        f'<h1>{title}</h1>\n<p class="under">{_text(_subtitle(plan))}</p>',
        _cards(plan),
        f"<p>{_text(plan_summary(plan))}</p>",
        f"<ul>{_items(plan_verdict(plan))}</ul>",
        f"<details><summary>How and for what it was made</summary><dl>{facts}</dl></details>",
        f"<nav>{links}</nav>",
        *sections,
        "</body>\n</html>\n",
    )
    return "\n".join(line for line in lines if line)


def _cards(plan: Plan) -> str:
    """Cards with the totals; in each, an arrow leads from torch's value to the plan's."""
    listed = "".join(
        f"<div>{name}<b>{_text(value)}</b><span>{_text(note)}</span></div>"
        for name, value, note in _totals(plan)
    )
    key = '<p class="under">torch\'s own → this plan</p>'
    return f'{key}<div class="cards">{listed}</div>' if listed else ""


def _totals(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Name, value and note of each total on a card: times, workspaces, peaks and kernels."""
    if not plan.kernels:
        return
    race, memory, limit = plan.step_race, plan.memory, plan.config.limit_bytes
    if race is None or not race.rounds:
        why = "" if race is None else f" ({race.reason})"
        yield "Whole step", "not timed", f"the plan was not raced in whole steps{why}"
    else:
        times = f"{format_ns(race.torch_ns)} → {format_ns(race.plan_ns)}"
        ratio = f"{race.ratio:.2f} times as long ({race.low:.2f} to {race.high:.2f})"
        yield "Whole step", times, ratio
    known = [(one, one.default, len(one.layers)) for one in plan.kernels if one.default]
    sizes = [default.workspace_bytes for _, default, _ in known]
    if known:
        torchs = sum(default.time_ns * calls for _, default, calls in known)
        planned = sum(kernel.timing.time_ns * calls for kernel, _, calls in known)
        about = "~" if any(kernel.timing.is_predicted for kernel, _, _ in known) else ""
        times = f"{format_ns(torchs)} → {about}{format_ns(planned)}"
        yield "Convolutions", times, f"{planned / torchs:.2f} times as long, summed up"
    most = f"{format_bytes(max(sizes))} → " if sizes else ""
    kept = "no limit" if limit is None else f"limit {format_bytes(limit)}"
    # With a pool, the workspace of the plan is a sum over all calls. torch's value would be the
    # largest workspace of a call, which cannot be compared with a sum, so it is left out.
    if plan.config.total_bytes is not None:
        most, kept = "", f"pool of {format_bytes(plan.config.total_bytes)}"
    yield "Workspace", f"{most}{format_bytes(plan.workspace_bytes)}", f"at most; {kept}"
    if memory is not None and memory.plan_peak_bytes:
        said = f"{format_bytes(memory.torch_peak_bytes)} → {format_bytes(memory.plan_peak_bytes)}"
        yield "Peak of a step", said, f"budget {format_bytes(memory.budget_bytes)}"
    changed = sum(not kernel.is_default for kernel in plan.kernels)
    partial = f", {len(plan.left_out)} left out" if plan.left_out else ""
    said = f"{changed} of {len(plan.kernels)}"
    yield "Kernels", said, f"leave torch's convolution{partial}"


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
        "demands": "deterministic" if plan.config.deterministic else "",
        "tuning": "" if plan.origin is None else str(plan.origin),
        "plan": plan.hash,
    }
