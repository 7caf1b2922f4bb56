"""Time over workspace of one kernel: its front, its plan, and what was rejected, for charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from ucudnn.plan import KernelPlan, Plan
from ucudnn.reports.charts import ABOVE, COLORS, GRID, HOVER, Chart, Row, byte_axis, plain
from ucudnn.reports.rationale import Rationale
from ucudnn.units import format_bytes, format_ns

CAPTION = (
    "Time of one call over its workspace, on a logarithmic axis; 0 B stands at its left end. The "
    "line is the front: the least sum of chunks that were timed in full, for every limit. "
    "Filled marks are whole calls, timed; open ones are predicted. What takes more than three "
    "times as long as the plan and torch's default stands in the table only."
)
# A line cannot end at infinity: it goes on beyond the largest workspace of the chart by this.
_BEYOND = 4
# Slower alternatives than so many times the plan and torch's default are left out of the chart.
_MOST_TIMES = 3


class Mark(NamedTuple):
    """A way to compute a kernel, as a point beside its front.

    Args:
        name: of the series that it belongs to.
        text: what it is, in one line.
        workspace_bytes: of one call.
        time_ns: of one call.
        is_measured: whether the whole call was timed.
    """

    name: str
    text: str
    workspace_bytes: int
    time_ns: int
    is_measured: bool


# Symbol and colour of each series, in the order of the legend.
LOOKS = {
    "rejected": ("circle", "#e69f00"),
    "torch in channels_last": ("square", "#009e73"),
    "torch's default": ("circle", "#8c8c8c"),
    "plan": ("diamond", "#0072b2"),
}


def _marks_of(kernel: KernelPlan, rationale: Rationale) -> list[Mark]:
    """The points of a kernel: alternatives, torch's own convolution, and the plan."""
    found = [
        Mark("rejected", str(one.split), one.workspace_bytes, one.time_ns, one.is_measured)
        for one in rationale.alternatives
        if one.time_ns is not None
        and one.workspace_bytes is not None
        # It has a mark of its own.
        and not (one.split.is_default and kernel.default is not None)
    ]
    for name, timing in (
        ("torch in channels_last", rationale.channels_last),
        ("torch's default", kernel.default),
        ("plan", kernel.timing),
    ):
        if timing is not None:
            text = str(kernel.split(kernel.problem.batch)) if name == "plan" else "undivided"
            size, measured = timing.workspace_bytes, not timing.is_predicted
            found.append(Mark(name, text, size, timing.time_ns, measured))
    return found


def front_chart(plan: Plan, row: Row, rationale: Rationale) -> Chart:
    """Chart of one kernel.

    Args:
        plan: that the kernel is of.
        row: the kernel.
        rationale: of that kernel.
    """
    points, limit = near_marks(row.kernel, rationale), plan.limit_bytes(row.kernel)
    sizes = [size for size, _ in rationale.front] + [one.workspace_bytes for one in points]
    axis, zero = byte_axis([*sizes, *([] if limit is None else [limit])])
    most = max(time_ns for time_ns in _times(rationale.front, points)) / 1e9
    traces = [*_front(rationale.front, sizes, zero), *_limit(limit, zero, most)]
    traces += [_marks(one, zero) for one in series_of(points)]
    yaxis = {"title": {"text": "time of one call"}, "tickformat": "~s", "ticksuffix": "s"}
    layout = {
        "height": 420,
        "margin": {"l": 70, "r": 20, "t": 50, "b": 50},
        "legend": ABOVE,
        "xaxis": {**GRID, **axis, "title": {"text": "workspace of one call"}},
        "yaxis": {**GRID, **yaxis, "range": [0, most * 1.08]},
        "hoverlabel": HOVER,
    }
    return Chart("Fronts", CAPTION, traces, layout)


def near_marks(kernel: KernelPlan, rationale: Rationale) -> list[Mark]:
    """The points of a kernel without those that would leave the others no room.

    Args:
        kernel: with its plan.
        rationale: of that kernel.
    """
    points = _marks_of(kernel, rationale)
    known = [one.time_ns for one in points if one.name in ("plan", "torch's default")]
    return [one for one in points if one.time_ns <= _MOST_TIMES * max(known)]


def series_of(points: Sequence[Mark]) -> Iterator[list[Mark]]:
    """Points of one name, measured ones apart from predicted ones, in the order of the legend.

    Args:
        points: of one kernel.
    """
    for name, measured in product(LOOKS, (True, False)):
        chosen = [one for one in points if (one.name, one.is_measured) == (name, measured)]
        if chosen:
            yield chosen


def _times(front: Sequence[tuple[int, int]], points: Sequence[Mark]) -> Iterator[int]:
    yield from (time_ns for _, time_ns in front)
    yield from (one.time_ns for one in points)


def _front(
    front: Sequence[tuple[int, int]], sizes: Sequence[int], zero: float
) -> Iterator[dict[str, Any]]:
    """The line, which goes on to the right: the last point holds for any larger workspace."""
    if not front:
        return
    drawn = [*front, (int(max(*sizes, 1) * _BEYOND), front[-1][1])]
    yield {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "front, predicted",
        "x": [size or zero for size, _ in drawn],
        "y": [time_ns / 1e9 for _, time_ns in drawn],
        "line": {"shape": "hv", "color": COLORS["plan"]},
        "marker": {"size": [5] * len(front) + [0]},
        "hovertext": [f"from {format_bytes(size)}: ~{format_ns(time)}" for size, time in drawn],
        "hoverinfo": "text",
    }


def _limit(limit: int | None, zero: float, most: float) -> Iterator[dict[str, Any]]:
    if limit is not None:
        yield {
            "type": "scatter",
            "mode": "lines",
            "name": f"limit {format_bytes(limit)}",
            "x": [limit or zero] * 2,
            "y": [0, most * 1.08],
            "line": {"color": COLORS["limit"], "dash": "dash"},
            "hoverinfo": "skip",
        }


def _marks(chosen: Sequence[Mark], zero: float) -> dict[str, Any]:
    name, measured = chosen[0].name, chosen[0].is_measured
    symbol, color = LOOKS[name]
    about = "" if measured else "~"
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name if measured else f"{name}, predicted",
        "x": [one.workspace_bytes or zero for one in chosen],
        "y": [one.time_ns / 1e9 for one in chosen],
        "marker": {
            "symbol": symbol if measured else f"{symbol}-open",
            "color": color,
            "size": 12 if name == "plan" else 9,
        },
        "hovertext": [
            f"<b>{plain(one.name)}</b>: {plain(one.text)}<br>{about}{format_ns(one.time_ns)} in "
            f"{format_bytes(one.workspace_bytes)}"
            for one in chosen
        ],
        "hoverinfo": "text",
    }
