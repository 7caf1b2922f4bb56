"""Tell rows that stand for a value from rows that cannot: for a million of them, without objects.

The rules are those of `Problem`, `Measurement` and `Entry`, which raise where these name a row.
"""

from __future__ import annotations

import numpy as np

from ucudnn.cache.entries import LATEST_NS
from ucudnn.cache.table.rows import NONE, Array, problem_from_row
from ucudnn.errors import ProblemError

_TIMED = (b"ok", b"screened")
_SIZES = ("input_size", "kernel_size", "stride", "dilation")
_COUNTS = ("batch", "in_channels", "out_channels", "groups")
_NUMBERS = ("time_ns", "spread_ns", "workspace_bytes")
# Sums and products of smaller numbers fit 64 bits.
_LARGE = 2**31


def possible_problems(problems: Array) -> Array:
    """Mark the rows of /problems that are convolutions.

    Args:
        problems: as `PROBLEM_ROW`, with words of this version.
    """
    axes = np.arange(problems["input_size"].shape[1])
    used = axes < np.count_nonzero(problems["input_size"], axis=1)[:, None]
    possible: Array = used.any(axis=1)
    for name in _COUNTS:
        possible &= problems[name] >= 1
    for name in _SIZES:
        sizes = problems[name]
        possible &= np.where(used, sizes >= 1, sizes == 0).all(axis=1)
    padding, both = problems["padding"], used[:, :, None]
    possible &= ((padding == 0) | ((padding > 0) & both)).all(axis=(1, 2))
    is_large = np.zeros(len(problems), bool)
    for name in (*_COUNTS, *_SIZES, "padding"):
        values = problems[name]
        is_large |= (values >= _LARGE).any(axis=tuple(range(1, values.ndim)))
    small = possible & ~is_large
    possible[small] = _fit(problems[small])
    for index in np.flatnonzero(possible & is_large):
        possible[index] = _is_problem(problems[index])
    return possible


def _fit(problems: Array) -> Array:
    """Rows whose channels divide by the groups, and whose kernel fits the padded input."""
    groups = problems["groups"]
    divide = (problems["in_channels"] % groups == 0) & (problems["out_channels"] % groups == 0)
    padded = problems["input_size"] + problems["padding"].sum(axis=2)
    extent = problems["dilation"] * (problems["kernel_size"] - 1) + 1
    # an axis that is not used has neither
    fits: Array = divide & ((extent <= padded) | (problems["input_size"] == 0)).all(axis=1)
    return fits


def _is_problem(row: Array) -> bool:
    try:
        problem_from_row(row)
    except ProblemError:
        return False
    return True


def possible_numbers(rows: Array) -> Array:
    """Mark the rows of /measurements whose numbers go together.

    Args:
        rows: of /measurements, with statuses of this version.
    """
    possible: Array = np.isin(rows["status"], _TIMED) == (rows["time_ns"] != NONE)
    for name in _NUMBERS:
        possible &= (rows[name] >= 0) | (rows[name] == NONE)
    return possible & (rows["stored_ns"] >= 0) & (rows["stored_ns"] <= LATEST_NS)
