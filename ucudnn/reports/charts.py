"""Charts of a plan, as plain values that plotly can draw.

Every number is from the plan, or from the rationales that the caller passes (fronts and rejected
splits). A predicted time never looks like a measured one.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate, groupby, product
from math import ceil, floor, log2, log10
from typing import Any, NamedTuple

from ucudnn.kernels.rationale import Rationale
from ucudnn.outcomes import Way
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Plan, Split, Timing
from ucudnn.reports.text import counted
from ucudnn.system.markup import printable
from ucudnn.units import format_bytes, format_ns

_COLORS = {
    "default": "#c4c4c4",
    "plan": "#64a9e0",
    "limit": "#d55e00",
    "live": "#a8a8a8",
    "peak": "#8c8c8c",
}
_COLOR_BY_OP = {"fprop": "#56b4e9", "dgrad": "#e69f00", "wgrad": "#009e73"}
_COLOR_BY_WAY = {"torch": "#8c8c8c", "segments": "#009e73", "loop": "#e69f00", "plan": "#0072b2"}
# Grey for torch's default, then the colours of Okabe and Ito, which colour-blind people can tell
# apart.
_PALETTE = ("#c4c4c4", "#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00")
_PATTERNS = ("", "/", ".", "x", "-", "|", "+", "\\")
# These colours suit a light page and a dark one; the page sets the colour of text.
_GRID = {"gridcolor": "rgba(128,128,128,.25)", "zeroline": False}
_HOVER = {"align": "left", "bgcolor": "white", "font": {"color": "#111"}}
_ABOVE = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}
_SECONDS = {"tickformat": "~s", "ticksuffix": "s"}
_BAR = {"type": "bar", "orientation": "h", "textposition": "inside", "textangle": 0}
# More equal chunks in a row than this are drawn as one bar, because the borders of so many bars
# would hide their colour.
_MOST_BARS = 16
_SIGNATURE = re.compile(r"conv\dd\((.*)\) at batch \d+")
# Symbol and colour of each series of marks in the chart of a kernel's front (the splits that no
# other split beats in both time and workspace), in the order of the legend.
_LOOKS = {
    "rejected": ("circle", "#e69f00"),
    "torch's default": ("circle", "#8c8c8c"),
    "plan": ("diamond", "#0072b2"),
}
# The line of a front goes on to the right up to this many times the largest workspace in the chart.
_BEYOND = 4
# A mark is left out if its time is more than this many times the longer of two times: the plan's
# and that of torch's default. Such a mark would leave the other marks no room.
_MOST_TIMES = 3


class ChartRow(NamedTuple):
    """A kernel in charts: its row counted from the top, its number in the plan, and its name."""

    place: int
    number: int
    name: str
    kernel: KernelPlan

    @property
    def calls(self) -> int:
        """Number of calls of the kernel in a step."""
        return len(self.kernel.layers)

    @property
    def split(self) -> Split:
        """The split of the largest planned batch."""
        return self.kernel.split(self.kernel.problem.batch)


class Chart(NamedTuple):
    """A figure for plotly, as plain values, with its name and caption."""

    name: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


# The points of a series in a chart: for each kernel its row, and its timing either by torch's
# default or by the plan.
_Timed = Sequence[tuple[ChartRow, Timing]]


def plain(text: str) -> str:
    """Escape text for plotly, which obeys some HTML tags, but shows &quot; as it is written."""
    return escape(printable(text), quote=False)


def charts(plan: Plan) -> tuple[Chart, ...]:
    """Charts of times, workspaces and splits of the kernels, and of the memory of a step."""
    rows = rows_of(plan)
    return (*_ways(plan), _times(rows), _workspaces(rows, plan), *_splits(rows), *_timeline(plan))


def rows_of(plan: Plan) -> list[ChartRow]:
    """A row per kernel, sorted by the time of all its calls by torch's default, longest first."""

    def order(numbered: tuple[int, KernelPlan]) -> tuple[bool, int]:
        kernel = numbered[1]
        timing = kernel.default or kernel.timing
        return kernel.default is None, -len(kernel.layers) * timing.time_ns

    names = short_names(plan)
    return [
        ChartRow(place, number, f"{number}  {names[number]}", kernel)
        for place, (number, kernel) in enumerate(sorted(enumerate(plan.kernels), key=order))
    ]


def short_names(plan: Plan) -> list[str]:
    """Names of the kernels for an axis, with the batch only if kernels have different batches."""
    several = len({kernel.problem.batch for kernel in plan.kernels}) > 1
    return [
        _SIGNATURE.sub(lambda found: found.group(1).replace(",", ""), str(kernel.problem))
        + (f" N={kernel.problem.batch}" if several else "")
        + (" slabs" if kernel.split(kernel.problem.batch).axis == "spatial" else "")
        for kernel in plan.kernels
    ]


def _arms(rows: Sequence[ChartRow]) -> Iterator[tuple[str, bool, _Timed]]:
    """The series of a chart: torch's default and the plan, each with measured or predicted times.

    Each is a tuple ("default" or "plan", whether its times are predicted, its points). A series
    without points is left out.
    """
    defaults = [(row, row.kernel.default) for row in rows if row.kernel.default]
    plans = [(row, row.kernel.timing) for row in rows]
    for arm, timed in (("default", defaults), ("plan", plans)):
        for predicted in (False, True):
            chosen = [entry for entry in timed if entry[1].is_predicted == predicted]
            if chosen:
                yield arm, predicted, chosen


def _times(rows: Sequence[ChartRow]) -> Chart:
    traces = [_bars(*arm) for arm in _arms(rows)]
    caption = (
        "Median time of one call, times the number of calls; whiskers: half the interquartile "
        "range to either side, times the calls. Sorted by the time of torch's default."
    )
    if any(predicted for _, predicted, _ in _arms(rows)):
        caption += " Hatched and marked ~: predicted from parts, never run as a whole."
    return Chart("Times", caption, traces, _by_row(rows, 36, _SECONDS) | {"barmode": "group"})


def _bars(arm: str, predicted: bool, timed: _Timed) -> dict[str, Any]:
    seconds = [timing.time_ns * row.calls / 1e9 for row, timing in timed]
    trace = {**_BAR, **_series(arm, predicted, timed), "x": seconds, "offsetgroup": arm}
    # If a bar is too short for its text, the text stands beside the bar.
    trace |= {"textposition": "auto", "insidetextanchor": "start", "constraintext": "none"}
    said = "~{} predicted" if predicted else "{}"
    trace["text"] = [said.format(format_ns(timing.time_ns * row.calls)) for row, timing in timed]
    if predicted:
        pattern = {"shape": "/", "fgcolor": _COLORS[arm], "bgcolor": "rgba(0,0,0,0)"}
        return {**trace, "marker": {**trace["marker"], "pattern": {**pattern, "solidity": 0.15}}}
    # The spread is the interquartile range. Each whisker has half of this length, so that both
    # whiskers together are as long as the range.
    spreads = [timing.spread_ns * row.calls / 2e9 for row, timing in timed]
    # The lower whisker is cut off at zero, because no time is negative.
    whiskers = {"array": spreads, "arrayminus": [*map(min, spreads, seconds)], "symmetric": False}
    return {**trace, "error_x": {**whiskers, "type": "data", "thickness": 1, "color": "#777"}}


def _series(arm: str, predicted: bool, timed: _Timed) -> dict[str, Any]:
    named = "torch's default" if arm == "default" else "plan"
    return {
        "name": f"{named}, {'predicted' if predicted else 'measured'}",
        "y": [row.place for row, _ in timed],
        "hovertext": [_details(row, timing, arm) for row, timing in timed],
        "hoverinfo": "text",
        "marker": {"color": _COLORS[arm], "line": {"color": "#555", "width": 1 + predicted}},
    }


def _details(row: ChartRow, timing: Timing, arm: str) -> str:
    taken = f"~{format_ns(timing.time_ns)} a call, predicted"
    if not timing.is_predicted:
        taken = (
            f"{format_ns(timing.time_ns)} a call, interquartile range "
            f"{format_ns(timing.spread_ns)}, {counted(timing.samples, 'sample')}"
        )
    lines = [f"{arm}: {taken}", f"workspace: {format_bytes(timing.workspace_bytes)}"]
    if arm == "plan":
        lines.append(f"split: {row.split}")
        if not timing.is_predicted:
            ratio = row.kernel.predicted_time_ns / timing.time_ns
            lines.append(f"predicted sum of the parts over measured: {ratio:.2f}")
    layers = textwrap.shorten(", ".join(dict.fromkeys(row.kernel.layers)), 180, placeholder=" ...")
    lines.append(f"calls: {row.calls} ({layers})")
    wrapped = [plain(part) for line in lines for part in textwrap.wrap(line, 90)]
    return "<br>".join([f"<b>{row.number}  {plain(str(row.kernel.problem))}</b>", *wrapped])


def _workspaces(rows: Sequence[ChartRow], plan: Plan) -> Chart:
    arms, limit = list(_arms(rows)), plan.config.limit_bytes
    sizes = [timing.workspace_bytes for _, _, timed in arms for _, timing in timed]
    left = [] if plan.memory is None else [plan.limit_bytes(row.kernel) or 0 for row in rows]
    axis, zero = _byte_axis([*sizes, *left, *([] if limit is None else [limit])])
    traces = [_dots(*arm, zero) for arm in arms]
    if limit is not None:
        ends = [limit or zero] * 2, [-0.5, len(rows) - 0.5]
        traces.append(_limit(f"workspace limit {format_bytes(limit)}", *ends))
    if left:
        mark = {"symbol": "line-ns", "size": 14, "line": {"width": 2, "color": _COLORS["limit"]}}
        at = {"x": [size or zero for size in left], "y": [row.place for row in rows]}
        name = "left by the memory budget"
        traces.append({"type": "scatter", "mode": "markers", "name": name, **at, "marker": mark})
    caption = "Workspace of one call, on a logarithmic axis; 0 B stands at its left end."
    return Chart("Workspaces", caption, traces, _by_row(rows, 20, axis))


def _dots(arm: str, predicted: bool, timed: _Timed, zero: float) -> dict[str, Any]:
    trace = {"type": "scatter", "mode": "markers", **_series(arm, predicted, timed)}
    trace["x"] = [timing.workspace_bytes or zero for _, timing in timed]
    # The default's dot is larger, so that it is seen behind the plan's dot at the same place.
    symbol, size = ("circle", 14) if arm == "default" else ("diamond", 8)
    trace["marker"] |= {"symbol": symbol + "-open" * predicted, "size": size}
    return trace


def _limit(
    name: str, x: Sequence[float], y: Sequence[float], color: str = _COLORS["limit"]
) -> dict[str, Any]:
    line = {"color": color, "dash": "dash"}
    at = {"x": [*x], "y": [*y], "hoverinfo": "skip"}
    return {"type": "scatter", "mode": "lines", "name": name, **at, "line": line}


def _byte_axis(sizes: Sequence[int]) -> tuple[dict[str, Any], float]:
    """A logarithmic axis with ticks at powers of two, and the position of zero on this axis."""
    positive = [size for size in sizes if size] or [1]
    low, high = floor(log2(min(positive))), ceil(log2(max(positive)))
    powers = range(low, high + 1, ceil((high + 1 - low) / 5))
    ticks = {2.0**power: format_bytes(2**power) for power in powers}
    # A logarithmic axis has no 0. So 0 is drawn below the smallest size, far enough away that the
    # labels of both fit.
    zero = 2.0 ** (low - max(2, ceil((high - low) / 6)))
    ticks |= {zero: "0 B"} if 0 in sizes else {}
    # For the range of a logarithmic axis, plotly expects exponents of ten.
    ends = [log10(min(ticks)) - 0.15, log10(2**high) + 0.3]
    axis = {"type": "log", "range": ends}
    return {**axis, "tickvals": list(ticks), "ticktext": list(ticks.values())}, zero


def _splits(every: Sequence[ChartRow]) -> Iterator[Chart]:
    kept = [row for row in every if not row.split.is_default]
    if not kept:
        return
    rows = [row._replace(place=place) for place, row in enumerate(kept)]
    # torch's default comes first, which gives it the first colour, grey.
    stripes: dict[str, list[dict[str, Any]]] = {DEFAULT_ALGORITHM: []}
    for row in rows:
        for algorithm, bar in _chunk_bars(row):
            stripes.setdefault(algorithm, []).append(bar)
    traces = [_stripe(*named, number) for number, named in enumerate(stripes.items()) if named[1]]
    caption = (
        "Chunks of one call at the planned batch, from first to last, coloured by algorithm. The "
        "number is a chunk's size: samples; of slabs, rows (in 3-D planes) of the result, for "
        "wgrad of the incoming gradient. 256x1: so many like chunks."
    )
    if len(kept) < len(every):
        others = counted(len(every) - len(kept), "other kernel")
        caption += f" Not drawn: {others} by torch's own convolution, undivided."
    axis = {"range": [0, 1], "tickformat": ".0%"}
    yield Chart("Splits", caption, traces, _by_row(rows, 24, axis) | {"barmode": "overlay"})


def _chunk_bars(row: ChartRow) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each bar its algorithm and place: a bar is a chunk, or many equal chunks in a row."""
    begin, whole = 0, row.split.size
    unit = "samples" if row.split.axis == "batch" else "rows"
    for chunk, run in groupby(row.split.chunks):
        count = len(list(run))
        together = count if count > _MOST_BARS else 1
        size = f"{together}x{chunk.size}" if together > 1 else str(chunk.size)
        width = chunk.size * together
        for _ in range(count // together):
            # Five digits are finer than a pixel. More digits would only make the file longer.
            drawn = {"y": row.place, "base": round(begin / whole, 5), "x": round(width / whole, 5)}
            yield (
                chunk.algorithm,
                {**drawn, "text": size, "customdata": f"{size} of {whole} {unit}"},
            )
            begin += width


def _stripe(algorithm: str, bars: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """The trace of all chunks by one algorithm; once colours run out, they repeat with patterns."""
    again, color = divmod(number, len(_PALETTE))
    pattern = {"shape": _PATTERNS[again % len(_PATTERNS)], "fillmode": "overlay", "fgcolor": "#555"}
    look = {"color": _PALETTE[color], "pattern": pattern, "line": {"color": "white", "width": 1}}
    hover = {"hovertemplate": "%{customdata}<br>%{fullData.name}<extra></extra>"}
    drawn = {field: [bar[field] for bar in bars] for field in bars[0]}
    # All bars get the same width (their height on the page). Otherwise plotly would derive the
    # width for each algorithm from the distance of its rows.
    name = {"name": plain(algorithm), "showlegend": True, "width": 0.8}
    return {**_BAR, **hover, **drawn, **name, "marker": look, "insidetextanchor": "middle"}


def _by_row(rows: Sequence[ChartRow], row_pixels: int, xaxis: dict[str, Any]) -> dict[str, Any]:
    """Layout of a chart with a row per kernel, the first row on top and the legend above it."""
    places = {
        "tickvals": [row.place for row in rows],
        "ticktext": [plain(row.name) for row in rows],
    }
    first_on_top = {"range": [len(rows) - 0.5, -0.5], "automargin": True, "ticks": "outside"}
    return {
        "height": 100 + row_pixels * len(rows),
        "margin": {"l": 20, "r": 20, "t": 40, "b": 20},
        "legend": {**_ABOVE, "xref": "container", "yref": "container", "yanchor": "top"},
        # The axis is at the top, because a chart with many rows is in a box that scrolls, which
        # shows the top first.
        "xaxis": {**_GRID, "side": "top", "automargin": True, "tickangle": 0, **xaxis},
        "yaxis": {**_GRID, **places, **first_on_top, "tickfont": {"size": 11}},
        "hoverlabel": _HOVER,
    }


def _over(xaxis: dict[str, Any], yaxis: dict[str, Any]) -> dict[str, Any]:
    """Layout of a chart whose axes are two quantities, such as time over memory."""
    return {
        "height": 420,
        "margin": {"l": 80, "r": 20, "t": 50, "b": 50},
        "legend": _ABOVE,
        "hoverlabel": _HOVER,
        # The ticks keep a distance between the labels and the axis. Without them, the first label
        # would touch the first label of the other axis.
        "xaxis": {**_GRID, "ticks": "outside", "ticklen": 6, **xaxis},
        "yaxis": {**_GRID, **yaxis},
    }


def _bytes_from_zero(title: str, most: int) -> dict[str, Any]:
    """A linear axis of bytes, with about ten ticks at multiples of a power of two."""
    ticks = range(0, most + 1, 2 ** max(0, ceil(log2(max(most, 10) / 10))))
    return {
        "title": {"text": title},
        "range": [0, most * 1.05],
        "tickvals": [*ticks],
        "ticktext": [*map(format_bytes, ticks)],
    }


class _Call(NamedTuple):
    """A call of a kernel in a step, with the time of all calls before it, and its live memory."""

    number: int
    kernel: KernelPlan
    begin_ns: int
    live_bytes: int


def _calls(plan: Plan) -> list[_Call]:
    """The calls of kernels in a step, in their order; empty if the plan has no memory budget."""
    known = [] if plan.memory is None else plan.memory.calls
    # Calls of kernels that the plan does not have are skipped, because a plan file may contain any
    # number of a kernel.
    chosen = [
        (index, plan.kernels[index], live) for index, live in known if index < len(plan.kernels)
    ]
    ends = accumulate(kernel.timing.time_ns for _, kernel, _ in chosen)
    return [
        _Call(index, kernel, end - kernel.timing.time_ns, live)
        for (index, kernel, live), end in zip(chosen, ends, strict=True)
    ]


def _timeline(plan: Plan) -> Iterator[Chart]:
    """Chart of live memory and workspace at each convolution of a step, if they are known."""
    calls = _calls(plan)
    if not calls or plan.memory is None:
        return
    end = (calls[-1].begin_ns + calls[-1].kernel.timing.time_ns) / 1e9
    levels = [("memory budget", plan.memory.budget_bytes, _COLORS["limit"])]
    if plan.memory.plan_peak_bytes:
        levels.append(("peak of the step", plan.memory.plan_peak_bytes, _COLORS["peak"]))
    traces = [_allocated("live", _COLORS["live"], calls, [call.live_bytes for call in calls])]
    for op, color in _COLOR_BY_OP.items():
        chosen = [call for call in calls if call.kernel.problem.op == op]
        sizes = [call.kernel.timing.workspace_bytes for call in chosen]
        if chosen:
            traces.append(_allocated(f"workspace of {op}", color, chosen, sizes))
    for name, size, color in levels:
        traces.append(_limit(f"{name} {format_bytes(size)}", [0, end], [size, size], color))
    xaxis = {"title": {"text": "time of convolutions"}, **_SECONDS, "range": [0, end]}
    yaxis = _bytes_from_zero("allocated", max(size for _, size, _ in levels))
    caption = (
        "Convolutions of a step by the plan, in their order: memory that is allocated beside the "
        "workspace of each, and its workspace on top. The time axis adds up the convolutions; "
        "what runs between them takes no width, and may be what allocates most."
    )
    layout = {**_over(xaxis, yaxis), "barmode": "stack", "bargap": 0}
    yield Chart("Timeline", caption, traces, layout)


def _ways(plan: Plan) -> Iterator[Chart]:
    """Chart of the time of a step over its peak of memory, with a mark per way to run a step."""
    memory, race = plan.memory, plan.step_race
    known = [] if memory is None else [*memory.ways]
    if memory is None or len(known) < 2:
        return
    if memory.plan_peak_bytes:
        # There is no race if torch's step does not fit; then the time is that of the last check.
        plan_ns = race.plan_ns if race is not None and race.rounds else memory.plan_ns
        foreseen = memory.plan_foreseen_bytes, memory.plan_foreseen_ns
        known.append(Way("plan", "this plan", *foreseen, memory.plan_peak_bytes, plan_ns))
    traces = []
    for kind, color in _COLOR_BY_WAY.items():
        for is_run in (False, True):
            ways = [one for one in known if (one.kind, bool(one.time_ns)) == (kind, is_run)]
            ways.sort(key=lambda way: way.most_bytes)
            about = "" if is_run else ", foreseen"
            marker = {"color": color, "size": 11 if is_run else 6}
            trace = {
                "type": "scatter",
                "mode": "markers" if is_run else "lines+markers",
                "name": f"{kind}{about}",
                "x": [way.most_bytes for way in ways],
                "y": [way.step_ns / 1e9 for way in ways],
                "text": [plain(way.name) for way in ways],
                "marker": marker,
                "line": {"color": color, "dash": "dot"},
            }
            traces += [trace] if ways else []
    budget = memory.budget_bytes
    slowest = max(way.step_ns for way in known) / 1e9
    traces.append(_limit(f"budget {format_bytes(budget)}", [budget, budget], [0, slowest]))
    axis = _bytes_from_zero("peak of a step", max(budget, *(way.most_bytes for way in known)))
    caption = (
        "Each mark is a step that was run, as a large dot, or foreseen. Further left is less "
        "memory, further down is faster."
    )
    yaxis = {"title": {"text": "time of a step"}, **_SECONDS, "rangemode": "tozero"}
    yield Chart("Memory and time", caption, traces, _over(axis, yaxis))


def _allocated(
    name: str, color: str, calls: Sequence[_Call], sizes: Sequence[int]
) -> dict[str, Any]:
    widths = [call.kernel.timing.time_ns / 1e9 for call in calls]
    hovers = [
        f"<b>{call.number}  {plain(str(call.kernel.problem))}</b><br>"
        f"{format_bytes(call.live_bytes)} live, {format_bytes(call.kernel.timing.workspace_bytes)} "
        f"of workspace, {format_ns(call.kernel.timing.time_ns)}"
        for call in calls
    ]
    return {
        "type": "bar",
        "name": name,
        "x": [call.begin_ns / 1e9 + width / 2 for call, width in zip(calls, widths, strict=True)],
        "width": widths,
        "y": [*sizes],
        "marker": {"color": color, "line": {"width": 0}},
        "hovertext": hovers,
        "hoverinfo": "text",
    }


class _Mark(NamedTuple):
    """A split of a kernel, or torch's own convolution, as a mark in the chart of the front."""

    series: str
    text: str
    workspace_bytes: int
    time_ns: int
    is_measured: bool


def fronts_chart(plan: Plan, rationales: Sequence[Rationale]) -> Chart:
    """Chart of the front of one kernel, which the reader chooses from a list in the chart."""
    rows = rows_of(plan)
    drawn = [_front_of(plan, row, rationales[row.number]) for row in rows]
    # Each trace is listed with the row of its kernel, because only the traces of one kernel are
    # visible at a time.
    traces = [(place, trace) for place, (own, _) in enumerate(drawn) for trace in own]
    for place, trace in traces:
        trace["visible"] = place == 0
    choice = [
        {
            "label": plain(row.name),
            "method": "update",
            "args": [
                {"visible": [place == row.place for place, _ in traces]},
                {
                    f"{name}.{key}": value
                    for name, axis in axes.items()
                    for key, value in axis.items()
                },
            ],
        }
        for row, (_, axes) in zip(rows, drawn, strict=True)
    ]
    caption = (
        "Time of one call over its workspace, on a logarithmic axis; 0 B stands at its left end. "
        "The line is the front: the least sum of chunks that were timed in full, for every limit. "
        "Filled marks are whole calls, timed; open ones are predicted. What takes more than three "
        "times as long as the plan and torch's default stands in the table only."
    )
    axes = drawn[0][1]
    xaxis = {"title": {"text": "workspace of one call"}, **axes["xaxis"]}
    yaxis = {"title": {"text": "time of one call"}, **_SECONDS, **axes["yaxis"]}
    layout = {**_over(xaxis, yaxis), "height": 500}
    layout["margin"] = {**layout["margin"], "t": 130}
    # Without a background colour, the list would be transparent, and the chart would be seen
    # through it.
    menu: dict[str, Any] = {"buttons": choice, "bgcolor": "white", "bordercolor": "#999"}
    menu |= {"x": 0, "xanchor": "left", "y": 1.3, "yanchor": "top"}
    return Chart("Fronts", caption, [one for _, one in traces], {**layout, "updatemenus": [menu]})


def _front_of(
    plan: Plan, row: ChartRow, rationale: Rationale
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    marks, limit = _near_marks(row.kernel, rationale), plan.limit_bytes(row.kernel)
    front = rationale.front
    sizes = [size for size, _ in front] + [one.workspace_bytes for one in marks]
    axis, zero = _byte_axis([*sizes, *([] if limit is None else [limit])])
    most = max([time_ns for _, time_ns in front] + [one.time_ns for one in marks]) * 1.08 / 1e9
    traces = []
    if front:
        # The last point of a front is the fastest split for any larger workspace, too. So the line
        # goes on to the right of this point.
        drawn = [*front, (max(*sizes, 1) * _BEYOND, front[-1][1])]
        hovers = [f"from {format_bytes(size)}: ~{format_ns(time)}" for size, time in drawn]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "front, predicted",
                "x": [size or zero for size, _ in drawn],
                "y": [time_ns / 1e9 for _, time_ns in drawn],
                "line": {"shape": "hv", "color": _COLORS["plan"]},
                "marker": {"size": [5] * len(front) + [0]},
                "hovertext": hovers,
                "hoverinfo": "text",
            }
        )
    if limit is not None:
        traces.append(_limit(f"limit {format_bytes(limit)}", [limit or zero] * 2, [0, most]))
    for series, is_measured in product(_LOOKS, (True, False)):
        chosen = [one for one in marks if (one.series, one.is_measured) == (series, is_measured)]
        if chosen:
            traces.append(_marks(chosen, zero))
    return traces, {"xaxis": axis, "yaxis": {"range": [0, most]}}


def _near_marks(kernel: KernelPlan, rationale: Rationale) -> list[_Mark]:
    """Marks of rejected splits, torch's own convolution and the plan, except very slow ones."""
    marks = [
        _Mark("rejected", str(one.split), one.workspace_bytes, one.time_ns, one.is_measured)
        for one in rationale.alternatives
        if one.time_ns is not None
        and one.workspace_bytes is not None
        # torch's own convolution gets its mark below, so it is left out here.
        and not (one.split.is_default and kernel.default is not None)
    ]
    known = kernel.timing.time_ns, kernel.default.time_ns if kernel.default else 0
    for series, text, timing in (
        ("torch's default", "undivided", kernel.default),
        ("plan", str(kernel.split(kernel.problem.batch)), kernel.timing),
    ):
        if timing is not None:
            size, is_measured = timing.workspace_bytes, not timing.is_predicted
            marks.append(_Mark(series, text, size, timing.time_ns, is_measured))
    return [one for one in marks if one.time_ns <= _MOST_TIMES * max(known)]


def _marks(chosen: Sequence[_Mark], zero: float) -> dict[str, Any]:
    series, is_measured = chosen[0].series, chosen[0].is_measured
    symbol, color = _LOOKS[series]
    about = "" if is_measured else "~"
    return {
        "type": "scatter",
        "mode": "markers",
        "name": series if is_measured else f"{series}, predicted",
        "x": [one.workspace_bytes or zero for one in chosen],
        "y": [one.time_ns / 1e9 for one in chosen],
        "marker": {
            "symbol": symbol if is_measured else f"{symbol}-open",
            "color": color,
            "size": 12 if series == "plan" else 9,
        },
        "hovertext": [
            f"<b>{series}</b>: {plain(one.text)}<br>{about}{format_ns(one.time_ns)} in "
            f"{format_bytes(one.workspace_bytes)}"
            for one in chosen
        ],
        "hoverinfo": "text",
    }
