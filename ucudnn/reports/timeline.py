"""Timeline of a step: what is allocated while each of its convolutions runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from ucudnn.plan import KernelPlan, Plan
from ucudnn.reports.charts import ABOVE, COLORS, GRID, HOVER, Chart, linear_ticks, plain
from ucudnn.units import format_bytes, format_ns

_COLOR_BY_OP = {"fprop": "#56b4e9", "dgrad": "#e69f00", "wgrad": "#009e73"}
_LIVE = "#a8a8a8"


class Call(NamedTuple):
    """A convolution of a step.

    Args:
        number: of its kernel in the plan.
        kernel: with its plan.
        begin_ns: time of all convolutions before it.
        live_bytes: allocated beside its workspace.
    """

    number: int
    kernel: KernelPlan
    begin_ns: int
    live_bytes: int


def calls(plan: Plan) -> list[Call]:
    """The convolutions of a step in their order; empty where the plan has no memory budget."""
    known = [] if plan.memory is None else plan.memory.calls
    # A plan file may name kernels that it does not have.
    chosen = [
        (index, plan.kernels[index], live) for index, live in known if index < len(plan.kernels)
    ]
    ends = accumulate(kernel.timing.time_ns for _, kernel, _ in chosen)
    return [
        Call(index, kernel, end - kernel.timing.time_ns, live)
        for (index, kernel, live), end in zip(chosen, ends, strict=True)
    ]


def timeline_chart(plan: Plan) -> Chart | None:
    """Chart of live memory and workspace over the time of convolutions; None where unknown."""
    listed = calls(plan)
    if not listed or plan.memory is None:
        return None
    last = listed[-1]
    end = last.begin_ns + last.kernel.timing.time_ns
    levels = {"memory budget": (plan.memory.budget_bytes, COLORS["limit"])}
    if plan.memory.plan_peak_bytes:
        levels["peak of the step"] = (plan.memory.plan_peak_bytes, "#8c8c8c")
    traces = [_bars("live", _LIVE, listed, [call.live_bytes for call in listed])]
    for op, color in _COLOR_BY_OP.items():
        chosen = [call for call in listed if call.kernel.problem.op == op]
        sizes = [call.kernel.timing.workspace_bytes for call in chosen]
        if chosen:
            traces.append(_bars(f"workspace of {op}", color, chosen, sizes))
    traces += [_level(name, *level, end) for name, level in levels.items()]
    most = max(level for level, _ in levels.values())
    ticks = linear_ticks(most)
    caption = (
        "Convolutions of a step by the plan, in their order: memory that is allocated beside the "
        "workspace of each, and its workspace on top. The time axis adds up the convolutions; "
        "what runs between them takes no width, and may be what allocates most."
    )
    xaxis = {"title": {"text": "time of convolutions"}, "tickformat": "~s", "ticksuffix": "s"}
    # Without them the first label would touch that of the other axis.
    marks = {"ticks": "outside", "ticklen": 6}
    layout = {
        "height": 420,
        "barmode": "stack",
        "bargap": 0,
        "margin": {"l": 80, "r": 20, "t": 50, "b": 50},
        "legend": ABOVE,
        "hoverlabel": HOVER,
        "xaxis": {**GRID, **xaxis, **marks, "range": [0, end / 1e9]},
        "yaxis": {
            **GRID,
            "title": {"text": "allocated"},
            "tickvals": ticks,
            "ticktext": [*map(format_bytes, ticks)],
            "range": [0, most * 1.05],
        },
    }
    return Chart("Timeline", caption, traces, layout)


def _bars(name: str, color: str, listed: list[Call], sizes: list[int]) -> dict[str, Any]:
    widths = [call.kernel.timing.time_ns / 1e9 for call in listed]
    return {
        "type": "bar",
        "name": name,
        "x": [call.begin_ns / 1e9 + width / 2 for call, width in zip(listed, widths, strict=True)],
        "width": widths,
        "y": sizes,
        "marker": {"color": color, "line": {"width": 0}},
        "hovertext": list(_hover(listed)),
        "hoverinfo": "text",
    }


def _hover(listed: list[Call]) -> Iterator[str]:
    for call in listed:
        timing = call.kernel.timing
        yield (
            f"<b>{call.number}  {plain(str(call.kernel.problem))}</b><br>"
            f"{format_bytes(call.live_bytes)} live, {format_bytes(timing.workspace_bytes)} of "
            f"workspace, {format_ns(timing.time_ns)}"
        )


def _level(name: str, level: int, color: str, end_ns: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{name} {format_bytes(level)}",
        "x": [0, end_ns / 1e9],
        "y": [level, level],
        "line": {"color": color, "dash": "dash"},
        "hoverinfo": "skip",
    }
