"""Fronts of kernels as a picture for papers: PNG, SVG or PDF.

matplotlib is optional and imported only here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from ucudnn.errors import ConfigError, UcudnnError
from ucudnn.plan import Plan
from ucudnn.reports.charts import COLORS, Row, byte_axis, rows_of
from ucudnn.reports.fronts import LOOKS, Mark, near_marks, series_of
from ucudnn.reports.rationale import Rationale
from ucudnn.system.files import write

FORMATS = ("png", "svg", "pdf")
# Kernels that are drawn where none is named.
MOST_KERNELS = 6
_MARKERS = {"circle": "o", "square": "s", "diamond": "D"}
# Inches of one panel: three of them are as wide as a page.
_WIDTH, _HEIGHT, _COLUMNS = 2.4, 2.1, 3


def plot_fronts(
    plan: Plan,
    path: str | os.PathLike[str],
    rationales: Sequence[Rationale],
    kernels: Sequence[int] = (),
) -> int:
    """Draw time over workspace of some kernels, each with its plan and torch's default.

    >>> plot_fronts(plan, "fronts.svg", rationales)  # doctest: +SKIP
    6

    Args:
        plan: that the kernels are of.
        path: of the file, whose name ends in .png, .svg or .pdf.
        rationales: what else is known of the kernels of the plan, in their order.
        kernels: indices in the plan; empty: those that take most time by torch's default.

    Returns:
        The number of kernels that were drawn.

    Raises:
        ConfigError: the plan has no kernels, or the name of the file ends otherwise.
        OutputError: the file cannot be written.
        UcudnnError: matplotlib is not installed.
    """
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ConfigError(f"the name of a plot must end in .png, .svg or .pdf, got {path}")
    rows = [row for row in rows_of(plan) if not kernels or row.number in kernels]
    rows = rows if kernels else rows[:MOST_KERNELS]
    if not rows:
        raise ConfigError("the plan has no kernels, and nothing can be drawn of it")
    write(path, _drawn(plan, rows, rationales, kind), "the plot")
    return len(rows)


def _drawn(plan: Plan, rows: Sequence[Row], rationales: Sequence[Rationale], kind: str) -> bytes:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        missing = "matplotlib, which draws plots, is not installed; run: pip install matplotlib"
        raise UcudnnError(missing) from error
    columns = min(_COLUMNS, len(rows))
    lines = -(-len(rows) // columns)
    stream = BytesIO()
    # Without the salt and with the date, each plot of a plan would be another file.
    with rc_context({"font.size": 7, "svg.hashsalt": "ucudnn"}):
        figure = Figure((columns * _WIDTH, lines * _HEIGHT + 0.35), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False).flat
        legend: dict[str, Any] = {}
        for panel, row in zip(panels, rows, strict=False):
            _draw(panel, plan, row, rationales[row.number])
            handles, names = panel.get_legend_handles_labels()
            legend |= {name: handle for handle, name in zip(handles, names, strict=True)}
        for panel in list(panels)[len(rows) :]:
            panel.set_axis_off()
        figure.legend(legend.values(), legend, loc="outside upper center", ncols=4, frameon=False)
        date = {"svg": "Date", "pdf": "CreationDate"}.get(kind)
        figure.savefig(stream, format=kind, dpi=200, metadata={date: None} if date else None)
    return stream.getvalue()


def _draw(panel: Any, plan: Plan, row: Row, rationale: Rationale) -> None:
    """One kernel, in axes of matplotlib."""
    points, limit = near_marks(row.kernel, rationale), plan.limit_bytes(row.kernel)
    sizes = [size for size, _ in rationale.front] + [one.workspace_bytes for one in points]
    axis, zero = byte_axis([*sizes, *([] if limit is None else [limit])])
    left, right = (10**end for end in axis["range"])
    if rationale.front:
        _step(panel, rationale.front, zero, right)
    if limit is not None:
        panel.axvline(limit or zero, color=COLORS["limit"], ls="--", lw=1, label="limit")
    for chosen in series_of(points):
        _scatter(panel, chosen, zero)
    panel.set_xscale("log")
    panel.set_xlim(left, right)
    panel.set_ylim(bottom=0)
    panel.set_xticks(axis["tickvals"], axis["ticktext"])
    panel.minorticks_off()
    panel.set_title(row.name, fontsize=7)
    panel.set_xlabel("workspace of one call")
    panel.set_ylabel("time of one call [ms]")


def _step(panel: Any, front: Sequence[tuple[int, int]], zero: float, right: float) -> None:
    x = [size or zero for size, _ in front]
    y = [time_ns / 1e6 for _, time_ns in front]
    # The last point holds for any larger workspace.
    panel.step([*x, right], [*y, y[-1]], where="post", lw=1, label="front, predicted")


def _scatter(panel: Any, chosen: Sequence[Mark], zero: float) -> None:
    name, measured = chosen[0].name, chosen[0].is_measured
    symbol, color = LOOKS[name]
    panel.scatter(
        [one.workspace_bytes or zero for one in chosen],
        [one.time_ns / 1e6 for one in chosen],
        s=22 if name == "plan" else 14,
        marker=_MARKERS[symbol],
        facecolors=color if measured else "none",
        edgecolors=color,
        linewidths=0.8,
        label=name if measured else f"{name}, predicted",
        zorder=3,
    )
