"""Tables of what limits.py and limits_layers.py found, beside what µ-cuDNN published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.units import format_bytes, format_ns

PUBLISHED = Path(__file__).parent / "results" / "mucudnn-2018"
UNDIVIDED, ALL = "undivided", "all"
Values = Mapping[str, Any]


def steps_table(found: Sequence[Values], names: Mapping[str, str]) -> list[list[str]]:
    """Heading and rows of steps under limits by policies.

    Args:
        found: entries of limits.py, one per network.
        names: of networks, where they have a better one.
    """
    published = json.loads((PUBLISHED / "published.json").read_text())
    heading = ["network", "limit", "policy", "step", "this step over the undivided one (95 %)"]
    heading += ["the same by µ-cuDNN on a GPU", "this step over torch's"]
    heading += ["workspace", "kernels over the limit", "peak of a step", "tuned in", "divided"]
    rows = [heading]
    for one in found:
        name = f"{names.get(one['network'], one['network'])}, {'x'.join(map(str, one['input']))}"
        theirs = published.get(one["network"], {})
        rows += [steps_row(name, one["rows"], row, theirs) for row in one["rows"]]
    return rows


def steps_row(name: str, rows: Sequence[Values], row: Values, published: Values) -> list[str]:
    """The row of one plan, or of torch's own convolutions."""
    torchs, samples = rows[0]["samples_ns"], row["samples_ns"]
    cells = [name, row["limit"] or "none", row["policy"] or "torch's own", time_text(samples)]
    if not row["limit"]:
        peaks = [format_bytes(row[key]) for key in ("workspace_bytes", "peak_bytes")]
        return [*cells, "-", "-", "1", peaks[0], "-", peaks[1], "-", "-"]
    alone = next(
        (one for one in rows if (one["limit"], one["policy"]) == (row["limit"], UNDIVIDED)), None
    )
    theirs = published.get(row["policy"]) if published.get("limit") == row["limit"] else None
    over = "-" if alone is None else ratio_text(samples, alone["samples_ns"])
    # Such an undivided row is no rival within the limit.
    over += "*" if alone is not None and alone["over_limit"] else ""
    return [
        *cells,
        "1" if row is alone else over,
        "-" if theirs is None else f"{1 / theirs:.2f}",
        ratio_text(samples, torchs),
        format_bytes(row["workspace_bytes"]),
        str(row["over_limit"]),
        format_bytes(row["peak_bytes"]),
        f"{row['tuned_s']:.0f} s",
        f"{row['divided']} of {row['kernels']}",
    ]


def layers_table(document: Values) -> list[list[str]]:
    """Heading and rows of forward passes of single layers: ours and the published ratio."""
    layers = document["layers"]
    heading = ["forward pass", "torch's own", "its workspace"]
    for limit in layers[0]["published"]:
        heading += [f"within {limit}: here (95 %)", "P100"]
    return [heading, *map(layers_row, layers)]


def layers_row(layer: Values) -> list[str]:
    """The row of one layer."""
    own = layer["splits"][0]
    cells = [layer["problem"], time_text(own["samples_ns"]), format_bytes(own["workspace_bytes"])]
    for limit, ratio in layer["published"].items():
        cells += [layer_ratio(layer, limit), f"{1 / ratio:.2f}"]
    return cells


def layer_ratio(layer: Values, limit: str) -> str:
    """Time of the best split over that of the undivided one, both within a limit."""
    alone, planned = (layer["chosen"][limit][policy] for policy in (UNDIVIDED, ALL))
    if planned is None:
        return "nothing fits"
    if alone is None:
        return "only divided fits"
    if alone == planned:
        return "1, undivided"
    return ratio_text(*(layer["splits"][place]["samples_ns"] for place in (planned, alone)))


def ratio_text(numerators: Sequence[int], denominators: Sequence[int]) -> str:
    """The median of paired ratios with its 95 % interval; "failed" where there are no pairs."""
    if not numerators or len(numerators) != len(denominators):
        return "failed"
    middle, low, high = ratio_interval(numerators, denominators)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def time_text(samples: Sequence[int]) -> str:
    """A median time with the interquartile range; "failed" where there is none."""
    if not samples:
        return "failed"
    return f"{format_ns(median_ns(samples))} ± {format_ns(spread_ns(samples))}"


def rendered(title: str, rows: Sequence[Sequence[str]]) -> Table:
    """A table for a terminal; the first row is the heading."""
    result = Table(*rows[0], title=title)
    for row in rows[1:]:
        result.add_row(*row)
    return result
