"""The curve of a plan, time over memory: as a table for a terminal, and as lines of a chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from ucudnn.plan import Plan
from ucudnn.races import Curve
from ucudnn.units import format_bytes, format_ns

Points = Sequence[tuple[int, int]]

# A table leaves points out between which the time falls by less than this part of it.
_LEAST_STEP = 0.01


class Place(NamedTuple):
    """A point to draw beside a curve.

    Args:
        name: what it is.
        size_bytes: of its memory.
        time_ns: of all its convolutions.
    """

    name: str
    size_bytes: int
    time_ns: int


def places(plan: Plan, by_peak: bool) -> list[Place]:
    """Torch's own convolutions and the plan, as whole calls were timed.

    Args:
        plan: with the memory of a step, where that is asked for.
        by_peak: by the memory of a whole step; else by the largest workspace.
    """
    defaults = [(kernel.default, len(kernel.layers)) for kernel in plan.kernels if kernel.default]
    default_ns = sum(timing.time_ns * calls for timing, calls in defaults)
    most = max((timing.workspace_bytes for timing, _ in defaults), default=0)
    planned_ns = sum(kernel.timing.time_ns * len(kernel.layers) for kernel in plan.kernels)
    sizes = [most, plan.workspace_bytes]
    if by_peak and plan.memory is not None:
        sizes = [plan.memory.torch_peak_bytes, plan.memory.plan_peak_bytes]
    found = [Place("this plan", sizes[1], planned_ns)]
    # Where torch cannot compute a kernel it has no time for all of them.
    if len(defaults) == len(plan.kernels):
        found.insert(0, Place("torch's own", sizes[0], default_ns))
    return found


class Shown(NamedTuple):
    """A table with what stands above and below it, which is wider than the table.

    Args:
        heading: above it.
        table: of some points of a curve.
        note: below it.
    """

    heading: str
    table: Table
    note: str


def curve_tables(plan: Plan, curve: Curve) -> list[Shown]:
    """Tables of time over workspace and, with a memory budget, over the memory of a step.

    Args:
        plan: that the curve is of.
        curve: of the plan.
    """
    shown = [_shown(plan, curve.by_workspace, "workspace of each kernel", False)]
    if curve.by_peak:
        shown.append(_shown(plan, curve.by_peak, "memory of the whole step", True))
    return shown


def _shown(plan: Plan, points: Points, what: str, by_peak: bool) -> Shown:
    found = "; ".join(
        f"{place.name} {format_ns(place.time_ns)} in {format_bytes(place.size_bytes)}"
        for place in places(plan, by_peak)
    )
    note = (
        f"{len(points)} points, of which those are left out that save less than {_LEAST_STEP:.0%}. "
        f"Predicted: sums of chunks that were timed. Whole calls, timed: {found}."
    )
    return Shown(f"Time of all convolutions over the {what}:", _table(points), note)


def _table(points: Points) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("from", "time", "of the fastest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for size, time_ns in _telling(points):
        ratio = f"{time_ns / points[-1][1]:.2f}x"
        table.add_row(format_bytes(size), format_ns(time_ns), ratio)
    return table


def _telling(points: Points) -> list[tuple[int, int]]:
    """The first point and the last, and those between that save enough."""
    kept = list(points[:1])
    for point in points[1:]:
        if point is points[-1] or point[1] <= (1 - _LEAST_STEP) * kept[-1][1]:
            kept.append(point)
    return kept


def curve_traces(plan: Plan, curve: Curve) -> list[dict[str, Any]]:
    """The curve in plotly's terms: a line by the memory of a step if it is known, else workspace.

    Args:
        plan: that the curve is of.
        curve: of the plan.
    """
    by_peak = bool(curve.by_peak)
    points = curve.by_peak or curve.by_workspace
    around = places(plan, by_peak)
    # The last point holds for all larger memory: the line goes on to whatever stands beside it.
    right = max(points[-1][0], *(place.size_bytes for place in around))
    drawn = [*points, (right, points[-1][1])]
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "least predicted time",
        "x": [size for size, _ in drawn],
        "y": [time_ns / 1e9 for _, time_ns in drawn],
        # A time holds from its memory on, up to that of the next point.
        "line": {"shape": "hv", "color": "#56b4e9"},
        "hovertext": [f"from {format_bytes(size)}: {format_ns(time)}" for size, time in drawn],
        "hoverinfo": "text",
    }
    marks = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"{place.name}, timed",
            "x": [place.size_bytes],
            "y": [place.time_ns / 1e9],
            "hovertext": [f"{format_bytes(place.size_bytes)}: {format_ns(place.time_ns)}"],
            "hoverinfo": "text",
            "marker": {"size": 10, "color": color, "symbol": symbol},
        }
        for place, color, symbol in zip(
            reversed(around), ("#d55e00", "#777777"), ("diamond", "circle"), strict=False
        )
    ]
    return [line, *marks]
