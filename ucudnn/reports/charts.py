"""Charts of a plan, as plain values that plotly can draw: ways to run a step, and each kernel.

Every number is from the plan, or from the rationales that the caller passes. A predicted time never
looks like a measured one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import product
from math import ceil, floor, log2, log10
from typing import Any, NamedTuple

from ucudnn.kernels.rationale import Alternative, Rationale
from ucudnn.outcomes import Way
from ucudnn.plan import KernelPlan, Plan, Split
from ucudnn.system.markup import printable
from ucudnn.units import format_bytes, format_ns

# Colours of Okabe and Ito, which colour-blind people can tell apart.
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#8c8c8c"
_PINK = "#cc79a7"
_COLOR_BY_WAY = {
    "torch": _GREY,
    "segments": _GREEN,
    "loop": _ORANGE,
    "compiled": _PINK,
    "plan": _BLUE,
}
# Symbol and colour of each series of marks in the chart of a kernel, in the order of the legend.
_LOOKS = {
    "rejected": ("circle", _ORANGE),
    "torch's default": ("circle", _GREY),
    "plan": ("diamond", _BLUE),
}
# These colours suit a light page and a dark one; the page sets the colour of text.
_GRID = {"gridcolor": "rgba(128,128,128,.25)", "zeroline": False, "automargin": True}
_SECONDS = {"tickformat": "~s", "ticksuffix": "s"}
_CLEAR = "rgba(0,0,0,0)"
# The line of a front goes on to the right up to this many times the largest workspace in the chart.
_BEYOND = 4
# The chart ends at this many times the longer of two times, the plan's and that of torch's default,
# so that very slow splits leave the other marks room. They are seen after zooming out.
_MOST_TIMES = 3


class Chart(NamedTuple):
    """A figure as plotly takes it."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]


def plain(text: str) -> str:
    """Escape text for plotly, which obeys some HTML tags, but shows &quot; as it is written."""
    return escape(printable(text), quote=False)


def _layout(xaxis: dict[str, Any], yaxis: dict[str, Any]) -> dict[str, Any]:
    return {
        "height": 460,
        # plotly's tool bar stands in the margin at the top, and the legend below the chart, so that
        # neither hides anything, however narrow the page is.
        "margin": {"l": 10, "r": 10, "t": 40, "b": 10},
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        "hoverlabel": {"align": "left", "bgcolor": "white", "font": {"color": "#111"}},
        "xaxis": {**_GRID, "ticks": "outside", **xaxis},
        "yaxis": {**_GRID, **_SECONDS, **yaxis},
        "modebar": {"bgcolor": _CLEAR, "color": _GREY},
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"family": "system-ui, sans-serif"},
    }


def _limit(name: str, size: float, most: float) -> dict[str, Any]:
    line = {"color": _RED, "dash": "dash"}
    at = {"x": [size, size], "y": [0, most], "hoverinfo": "skip"}
    return {"type": "scatter", "mode": "lines", "name": name, **at, "line": line}


def ways_chart(ways: Sequence[Way], budget_bytes: int) -> Chart:
    """Chart of the time of a step over its peak of memory, with a mark per way to run a step."""
    traces = []
    for (kind, color), is_run in product(_COLOR_BY_WAY.items(), (False, True)):
        chosen = [one for one in ways if (one.kind, bool(one.time_ns)) == (kind, is_run)]
        if chosen:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers" if is_run else "lines+markers",
                    "name": kind if is_run else f"{kind}, foreseen",
                    "x": [way.most_bytes for way in chosen],
                    "y": [way.step_ns / 1e9 for way in chosen],
                    "hovertext": [plain(way.name) for way in chosen],
                    "marker": {"color": color, "size": 11 if is_run else 6},
                    "line": {"color": color, "dash": "dot"},
                }
            )
    slowest = max(way.step_ns for way in ways) / 1e9
    traces.append(_limit(f"budget {format_bytes(budget_bytes)}", budget_bytes, slowest))
    most = max(budget_bytes, *(way.most_bytes for way in ways), 1)
    # About five ticks, at multiples of a power of two.
    ticks = range(0, most + 1, 2 ** ceil(log2(max(most, 5) / 5)))
    xaxis = {
        "title": {"text": "peak of a step"},
        "range": [0, most * 1.05],
        "tickvals": [*ticks],
        "ticktext": [*map(format_bytes, ticks)],
    }
    yaxis = {"title": {"text": "time of a step"}, "rangemode": "tozero"}
    return Chart(traces, _layout(xaxis, yaxis))


def kernel_chart(plan: Plan, kernel: KernelPlan, rationale: Rationale) -> Chart:
    """Chart of the time of a call of a kernel over its workspace: front, plan and alternatives."""
    front, limit = rationale.front, plan.limit_bytes(kernel)
    marks = [
        (series, one)
        for series, one in _marks(kernel, rationale)
        if one.time_ns is not None and one.workspace_bytes is not None
    ]
    points = [*front, *((one.workspace_bytes or 0, one.time_ns or 0) for _, one in marks)]
    sizes, times = ([*column] for column in zip(*points, strict=True))
    axis, zero = _byte_axis([*sizes, *([] if limit is None else [limit])])
    known = kernel.timing.time_ns, kernel.default.time_ns if kernel.default else 0
    most = min(max(times), _MOST_TIMES * max(known)) * 1.08 / 1e9
    traces = []
    if front:
        # The last point of a front is the fastest split for any larger workspace, too. So the line
        # goes on to the right of this point.
        drawn = [*front, (max(*sizes, 1) * _BEYOND, front[-1][1])]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "front, predicted",
                "x": [size or zero for size, _ in drawn],
                "y": [time_ns / 1e9 for _, time_ns in drawn],
                "line": {"shape": "hv", "color": _BLUE},
                "marker": {"size": [5] * len(front) + [0]},
                "hovertext": [f"from {format_bytes(size)}: ~{format_ns(ns)}" for size, ns in drawn],
                "hoverinfo": "text",
            }
        )
    if limit is not None:
        traces.append(_limit(f"limit {format_bytes(limit)}", limit or zero, most))
    for key in product(_LOOKS, (True, False)):
        chosen = [one for series, one in marks if (series, one.is_measured) == key]
        if chosen:
            traces.append(_trace(key[0], chosen, zero))
    xaxis = {"title": {"text": "workspace of one call"}, **axis}
    yaxis = {"title": {"text": "time of one call"}, "range": [0, most]}
    return Chart(traces, _layout(xaxis, yaxis))


def _marks(kernel: KernelPlan, rationale: Rationale) -> Iterator[tuple[str, Alternative]]:
    """Rejected splits, torch's own convolution and the plan, each with the name of its series."""
    for one in rationale.alternatives:
        # torch's own convolution gets its mark below.
        if not (one.split.is_default and kernel.default is not None):
            yield "rejected", one
    batch = kernel.problem.batch
    for series, split, timing in (
        ("torch's default", Split.default(batch), kernel.default),
        ("plan", kernel.split(batch), kernel.timing),
    ):
        if timing is not None:
            sizes = timing.time_ns, timing.workspace_bytes
            yield series, Alternative(split, *sizes, None, not timing.is_predicted, "")


def _trace(series: str, marks: Sequence[Alternative], zero: float) -> dict[str, Any]:
    is_measured = marks[0].is_measured
    symbol, color = _LOOKS[series]
    hovers = []
    for one in marks:
        split, time, workspace, _, reason = map(plain, one.cells)
        why = f": {reason}" if reason else ""
        hovers.append(f"<b>{series}</b>: {split}{why}<br>{time} in {workspace}")
    return {
        "type": "scatter",
        "mode": "markers",
        "name": series if is_measured else f"{series}, predicted",
        "x": [one.workspace_bytes or zero for one in marks],
        "y": [(one.time_ns or 0) / 1e9 for one in marks],
        "marker": {
            "symbol": symbol if is_measured else f"{symbol}-open",
            "color": color,
            "size": 12 if series == "plan" else 9,
        },
        "hovertext": hovers,
        "hoverinfo": "text",
    }


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
