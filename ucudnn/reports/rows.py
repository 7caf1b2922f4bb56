"""The kernels of a plan as rows with one value in each column: for CSV, Markdown and JSON."""

from __future__ import annotations

from typing import Any

from ucudnn.plan import KernelPlan, Plan
from ucudnn.system.markup import csv_table, markdown_table
from ucudnn.units import format_bytes, format_ns

# A file format that users read: names and order must stay, new ones come last.
COLUMNS = (
    *("number", "kernel", "op", "batch", "calls", "layers", "split"),
    *("default_ns", "default_workspace_bytes", "plan_ns", "plan_spread_ns"),
    *("plan_workspace_bytes", "samples", "predicted_ns", "gain"),
)


def kernel_row(number: int, kernel: KernelPlan) -> dict[str, Any]:
    """One kernel by `COLUMNS`: times in ns, workspaces in bytes, None for what is not known.

    Args:
        number: of the kernel in the plan, from 0.
        kernel: with its split at the largest planned batch.
    """
    split, default, timing = kernel.split(kernel.problem.batch), kernel.default, kernel.timing
    gain = None if default is None else round(default.time_ns / timing.time_ns, 4)
    values = (
        *(number, str(kernel.problem), kernel.problem.op, kernel.problem.batch),
        *(len(kernel.layers), " ".join(dict.fromkeys(kernel.layers)), str(split)),
        None if default is None else default.time_ns,
        None if default is None else default.workspace_bytes,
        *(timing.time_ns, timing.spread_ns, timing.workspace_bytes, timing.samples),
        *(kernel.predicted_time_ns, 1.0 if split.is_default else gain),
    )
    return dict(zip(COLUMNS, values, strict=True))


def plan_csv(plan: Plan) -> str:
    """The kernels as CSV; what is not known is empty."""
    rows = [kernel_row(number, kernel).values() for number, kernel in enumerate(plan.kernels)]
    return csv_table(COLUMNS, [["" if cell is None else cell for cell in row] for row in rows])


def plan_markdown(plan: Plan) -> str:
    """The kernels as a table in Markdown, with units."""
    rows = []
    for number, kernel in enumerate(plan.kernels):
        row = kernel_row(number, kernel)
        default = kernel.default
        rows.append(
            (
                *(str(number), row["kernel"], str(row["calls"])),
                "-" if default is None else format_ns(default.time_ns),
                "-" if default is None else format_bytes(default.workspace_bytes),
                *(format_ns(kernel.timing.time_ns), format_bytes(kernel.timing.workspace_bytes)),
                "-" if row["gain"] is None else f"{row['gain']:.2f}",
                row["split"],
            )
        )
    head = ("#", "kernel", "calls", "default", "workspace", "plan", "workspace", "gain", "split")
    return markdown_table(head, rows)


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan's file as JSON values, each kernel with its row as `summary`."""
    document = plan.to_dict()
    # A file with these beside the tables would not have the checksum that it names.
    del document["checksum"]
    for number, (kernel, fields) in enumerate(zip(plan.kernels, document["kernels"], strict=True)):
        fields["summary"] = kernel_row(number, kernel)
    return {**document, "left_out": list(plan.left_out)}
