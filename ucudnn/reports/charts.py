"""Charts of the kernels of a plan, in plotly's terms, as plain values.

Every number is from the plan, and a predicted time is never drawn like a measured one.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from itertools import groupby
from math import ceil, floor, log2, log10
from typing import Any, NamedTuple

from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Plan, Split, Timing
from ucudnn.races import Curve
from ucudnn.reports.curve import curve_traces
from ucudnn.reports.text import counted
from ucudnn.units import format_bytes, format_ns

# What a mark stands for: the kernel, and its timing under the default or the plan.
Timed = Sequence[tuple["Row", Timing]]

COLORS = {"default": "#c4c4c4", "plan": "#64a9e0", "limit": "#d55e00"}
# For a light page and a dark one: the page decides about the colour of text.
GRID = {"gridcolor": "rgba(128,128,128,.25)", "zeroline": False}
HOVER = {"align": "left", "bgcolor": "white", "font": {"color": "#111"}}
ABOVE = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}
# Grey for torch's default, then Okabe and Ito's, which colour-blind people can tell apart.
_PALETTE = ("#c4c4c4", *("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00"))
_PATTERNS = ("", "/", ".", "x", "-", "|", "+", "\\")
_MOST_SEGMENTS = 16  # a run of more like chunks is one segment: their borders would hide them
_BAR = {"type": "bar", "orientation": "h", "textposition": "inside", "textangle": 0}
plain = partial(escape, quote=False)  # plotly reads some HTML, but shows &quot; as it is
_SIGNATURE = re.compile(r"conv\dd\((.*)\) at batch \d+")


class Row(NamedTuple):
    """One kernel: its position in charts, from the top; its number, name, and name for plotly."""

    place: int
    number: int
    name: str
    label: str
    kernel: KernelPlan
    split: Split
    calls: int


class Chart(NamedTuple):
    """A figure for plotly, as plain values, with its heading."""

    name: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


def charts(plan: Plan) -> tuple[Chart, ...]:
    """Charts of times, workspaces and splits of the kernels, and of the curve of a plan."""
    rows = rows_of(plan)
    drawn = [_times(rows), _workspaces(rows, plan), *_splits(rows)]
    return tuple(drawn if plan.curve is None else [*drawn, _curve(plan, plan.curve)])


def rows_of(plan: Plan) -> list[Row]:
    """The kernels, by the time of torch's default over all calls, the longest first."""

    # False sorts before True; the longest time comes first.
    def order(numbered: tuple[int, KernelPlan]) -> tuple[bool, int]:
        kernel = numbered[1]
        calls, timing = len(kernel.layers), kernel.default or kernel.timing
        return kernel.default is None, -calls * timing.time_ns

    rows = []
    names = short_names(plan)
    for place, (index, kernel) in enumerate(sorted(enumerate(plan.kernels), key=order)):
        split = kernel.split(kernel.problem.batch)
        name = f"{index}  {names[index]}{' slabs' if split.axis == 'spatial' else ''}"
        rows.append(Row(place, index, name, plain(name), kernel, split, len(kernel.layers)))
    return rows


def short_names(plan: Plan) -> list[str]:
    """Names of the kernels for an axis; the batch only where there are several."""
    several = len({kernel.problem.batch for kernel in plan.kernels}) > 1
    return [
        _SIGNATURE.sub(lambda found: found.group(1).replace(",", ""), str(kernel.problem))
        + (f" N={kernel.problem.batch}" if several else "")
        for kernel in plan.kernels
    ]


def _arms(rows: Sequence[Row]) -> Iterator[tuple[str, bool, Timed]]:
    """Default and plan, measured times apart from predicted ones; empty series are omitted."""
    defaults = [(row, row.kernel.default) for row in rows if row.kernel.default]
    plans = [(row, row.kernel.timing) for row in rows]
    for arm, timed in (("default", defaults), ("plan", plans)):
        for predicted in (False, True):
            chosen = [entry for entry in timed if entry[1].is_predicted == predicted]
            if chosen:
                yield arm, predicted, chosen


def _times(rows: Sequence[Row]) -> Chart:
    traces = [_bars(*arm) for arm in _arms(rows)]
    caption = (
        "Median time of one call, times the number of calls; whiskers: half the interquartile "
        "range to either side, times the calls. Sorted by the time of torch's default."
    )
    if any(predicted for _, predicted, _ in _arms(rows)):
        caption += " Hatched and marked ~: predicted from parts, never run as a whole."
    axis = {"tickformat": "~s", "ticksuffix": "s"}
    return Chart("Times", caption, traces, _layout(rows, 36, axis) | {"barmode": "group"})


def _bars(arm: str, predicted: bool, timed: Timed) -> dict[str, Any]:
    seconds = [timing.time_ns * row.calls / 1e9 for row, timing in timed]
    trace = {**_BAR, **_series(arm, predicted, timed), "x": seconds, "offsetgroup": arm}
    # A text that its bar is too short for stands beside it.
    trace |= {"textposition": "auto", "insidetextanchor": "start", "constraintext": "none"}
    said = "~{} predicted" if predicted else "{}"
    trace["text"] = [said.format(format_ns(timing.time_ns * row.calls)) for row, timing in timed]
    if predicted:
        pattern = {
            "shape": "/",
            "fgcolor": COLORS[arm],
            "bgcolor": "rgba(0,0,0,0)",
            "solidity": 0.15,
        }
        return {**trace, "marker": {**trace["marker"], "pattern": pattern}}
    # Half, so that a whisker is as long as the range.
    spreads = [timing.spread_ns * row.calls / 2e9 for row, timing in timed]
    # no time is below zero, however wide the spread
    whiskers = {"array": spreads, "arrayminus": [*map(min, spreads, seconds)], "symmetric": False}
    return {**trace, "error_x": {**whiskers, "type": "data", "thickness": 1, "color": "#777"}}


def _series(arm: str, predicted: bool, timed: Timed) -> dict[str, Any]:
    """Common settings of the marks of one series in a chart."""
    named = "torch's default" if arm == "default" else "plan"
    return {
        "name": f"{named}, {'predicted' if predicted else 'measured'}",
        "y": [row.place for row, _ in timed],
        "hovertext": [_details(row, timing, arm) for row, timing in timed],
        "hoverinfo": "text",
        "marker": {"color": COLORS[arm], "line": {"color": "#555", "width": 1 + predicted}},
    }


def _details(row: Row, timing: Timing, arm: str) -> str:
    """Description of one mark, in lines."""
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
    layers = textwrap.shorten(", ".join(row.kernel.layers), 180, placeholder=" ...")
    lines.append(f"calls: {row.calls} ({layers})")
    # plotly does not break lines
    wrapped = [plain(part) for line in lines for part in textwrap.wrap(line, 90)]
    return "<br>".join([f"<b>{row.number}  {plain(str(row.kernel.problem))}</b>", *wrapped])


def _left_by_budget(rows: Sequence[Row], left: Sequence[int], zero: float) -> dict[str, Any]:
    mark = {"symbol": "line-ns", "size": 14, "line": {"width": 2, "color": COLORS["limit"]}}
    at = {"x": [size or zero for size in left], "y": [row.place for row in rows]}
    name = "left by the memory budget"
    return {"type": "scatter", "mode": "markers", "name": name, **at, "marker": mark}


def _workspaces(rows: Sequence[Row], plan: Plan) -> Chart:
    arms, limit = list(_arms(rows)), plan.config.limit_bytes
    sizes = [timing.workspace_bytes for _, _, timed in arms for _, timing in timed]
    left = [] if plan.memory is None else [plan.limit_bytes(row.kernel) or 0 for row in rows]
    axis, zero = byte_axis([*sizes, *left, *([] if limit is None else [limit])])
    traces = [_dots(*arm, zero) for arm in arms]
    if limit is not None:
        ends = {"x": [limit or zero] * 2, "y": [-0.5, len(rows) - 0.5]}
        name, line = (
            f"workspace limit {format_bytes(limit)}",
            {"color": COLORS["limit"], "dash": "dash"},
        )
        traces.append({"type": "scatter", "mode": "lines", "name": name, **ends, "line": line})
    if left:
        traces.append(_left_by_budget(rows, left, zero))
    caption = "Workspace of one call, on a logarithmic axis; 0 B stands at its left end."
    return Chart("Workspaces", caption, traces, _layout(rows, 20, axis))


def _dots(arm: str, predicted: bool, timed: Timed, zero: float) -> dict[str, Any]:
    trace = {"type": "scatter", "mode": "markers", **_series(arm, predicted, timed)}
    trace["x"] = [timing.workspace_bytes or zero for _, timing in timed]
    # the default's dot is larger, so that it is seen behind an equal one of the plan
    symbol, size = ("circle", 14) if arm == "default" else ("diamond", 8)
    trace["marker"] |= {"symbol": symbol + "-open" * predicted, "size": size}
    return trace


def byte_axis(sizes: Sequence[int]) -> tuple[dict[str, Any], float]:
    """A logarithmic axis with ticks at powers of two, and where zero is drawn on it."""
    positive = [size for size in sizes if size] or [1]
    low, high = floor(log2(min(positive))), ceil(log2(max(positive)))
    powers = range(low, high + 1, ceil((high + 1 - low) / 5))
    ticks = {2.0**power: format_bytes(2**power) for power in powers}
    # A logarithmic axis has no 0: it is drawn far enough below the smallest size for both labels.
    zero = 2.0 ** (low - max(2, ceil((high - low) / 6)))
    ticks |= {zero: "0 B"} if 0 in sizes else {}
    # plotly takes the range of a logarithmic axis as exponents
    ends = [log10(min(ticks)) - 0.15, log10(2**high) + 0.3]
    axis = {"type": "log", "range": ends}
    return {**axis, "tickvals": list(ticks), "ticktext": list(ticks.values())}, zero


def _curve(plan: Plan, curve: Curve) -> Chart:
    traces = curve_traces(plan, curve)
    sizes = [size for trace in traces for size in trace["x"]]
    what = "memory of the whole step" if curve.by_peak else "workspace of each kernel"
    caption = (
        f"Least time of all convolutions of a step over the {what}: predicted, from chunks that "
        "were timed one by one. The marks are whole calls."
    )
    ticks = linear_ticks(max(sizes), min(sizes))
    xaxis = {"title": {"text": what}, "tickvals": ticks, "ticktext": [*map(format_bytes, ticks)]}
    # Not from zero: what is live all along would be most of the chart.
    room = (max(sizes) - min(sizes)) * 0.05 or 1
    xaxis["range"] = [min(sizes) - room, max(sizes) + room]
    yaxis = {
        "title": {"text": "time"},
        "tickformat": "~s",
        "ticksuffix": "s",
        "rangemode": "tozero",
    }
    return Chart(
        "Curve",
        caption,
        traces,
        {
            "height": 420,
            "margin": {"l": 70, "r": 20, "t": 50, "b": 50},
            "legend": ABOVE,
            "hoverlabel": HOVER,
            "xaxis": {**GRID, **xaxis},
            "yaxis": {**GRID, **yaxis},
        },
    )


def linear_ticks(most: int, least: int = 0) -> list[int]:
    """About ten multiples of a power of two between two numbers of bytes."""
    step = 2 ** max(0, ceil(log2(max(most - least, 10) / 10)))
    return list(range(least // step * step, most + step, step))


def _splits(every: Sequence[Row]) -> Iterator[Chart]:
    """The chunks of the kernels that are not torch's own; nothing if there are none."""
    kept = [row for row in every if not row.split.is_default]
    if not kept:
        return
    rows = [row._replace(place=place) for place, row in enumerate(kept)]
    # torch's default comes first, which gives it the first colour, grey.
    stripes: dict[str, list[dict[str, Any]]] = {DEFAULT_ALGORITHM: []}
    for row in rows:
        for algorithm, segment in _segments(row):
            stripes.setdefault(algorithm, []).append(segment)
    traces = [_stripe(*named, number) for number, named in enumerate(stripes.items()) if named[1]]
    caption = (
        "Chunks of one call at the planned batch, from first to last, coloured by algorithm. The "
        "number is a chunk's size: samples; of slabs, rows (in 3-D planes) of the result, for "
        "wgrad of the incoming gradient; where these are of some samples at a time, those of the "
        "first samples. 256x1: so many like chunks."
    )
    if len(kept) < len(every):
        others = counted(len(every) - len(kept), "other kernel")
        caption += f" Not drawn: {others} by torch's own convolution, undivided."
    axis = {"range": [0, 1], "tickformat": ".0%"}
    yield Chart("Splits", caption, traces, _layout(rows, 24, axis) | {"barmode": "overlay"})


def _segments(row: Row) -> Iterator[tuple[str, dict[str, Any]]]:
    """The algorithm of each chunk, and its interval on the axis."""
    begin, whole = 0, row.split.size
    unit = "samples" if row.split.axis == "batch" else "rows"
    for step, run in groupby(row.split.steps):
        count = len(list(run))
        together = count if count > _MOST_SEGMENTS else 1
        size = f"{together}x{step.size}" if together > 1 else str(step.size)
        width = step.size * together
        for _ in range(count // together):
            # Five digits are finer than a pixel; more would only make the file longer.
            drawn = {"y": row.place, "base": round(begin / whole, 5), "x": round(width / whole, 5)}
            yield step.algorithm, {**drawn, "text": size, "customdata": f"{size} of {whole} {unit}"}
            begin += width


def _stripe(algorithm: str, segments: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """All segments of one algorithm; after the last colour, colours repeat with a pattern."""
    again, color = divmod(number, len(_PALETTE))
    pattern = {"shape": _PATTERNS[again % len(_PATTERNS)], "fillmode": "overlay", "fgcolor": "#555"}
    look = {"color": _PALETTE[color], "pattern": pattern, "line": {"color": "white", "width": 1}}
    hover = {"hovertemplate": "%{customdata}<br>%{fullData.name}<extra></extra>"}
    drawn = {field: [segment[field] for segment in segments] for field in segments[0]}
    # a width of its own for each algorithm would follow how far apart its rows are
    name = {"name": plain(algorithm), "showlegend": True, "width": 0.8}
    return {**_BAR, **hover, **drawn, **name, "marker": look, "insidetextanchor": "middle"}


def _layout(rows: Sequence[Row], row_pixels: int, xaxis: dict[str, Any]) -> dict[str, Any]:
    """Rows below each other, the first on top; the legend above them."""
    places = {"tickvals": [row.place for row in rows], "ticktext": [row.label for row in rows]}
    first_on_top = {"range": [len(rows) - 0.5, -0.5], "automargin": True, "ticks": "outside"}
    return {
        "height": 100 + row_pixels * len(rows),
        "margin": {"l": 20, "r": 20, "t": 40, "b": 20},
        "legend": {**ABOVE, "xref": "container", "yref": "container", "yanchor": "top"},
        # At the top: with many rows the chart is in a box that scrolls.
        "xaxis": {**GRID, "side": "top", "automargin": True, "tickangle": 0, **xaxis},
        "yaxis": {**GRID, **places, **first_on_top, "tickfont": {"size": 11}},
        "hoverlabel": HOVER,
    }
