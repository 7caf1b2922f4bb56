"""Find rows with impossible values, in whole columns and without building objects.

The rules are those of `Problem`, `Measurement` and `Entry`, whose constructors raise for the rows
that are refused here; a test compares the two.
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
# Below this, the sums and products of `_fits` cannot overflow 64 bits.
_LARGE = 2**31


def possible_problems(problems: Array) -> Array:
    """Mark the rows of /problems that are valid convolutions.

    Args:
        problems: rows of `PROBLEM_DTYPE`, whose words this version knows.
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
    possible[small] = _fits(problems[small])
    # Such sizes are so rare that Python's integers, which do not overflow, are fast enough.
    for index in np.flatnonzero(possible & is_large):
        possible[index] = _is_problem(problems[index])
    return possible


def _fits(problems: Array) -> Array:
    """Mark rows whose groups divide the channels and whose kernel fits the padded input."""
    groups = problems["groups"]
    divide = (problems["in_channels"] % groups == 0) & (problems["out_channels"] % groups == 0)
    padded = problems["input_size"] + problems["padding"].sum(axis=2)
    extent = problems["dilation"] * (problems["kernel_size"] - 1) + 1
    # An unused axis has an input of 0, which even its extent of 1 exceeds.
    fits: Array = divide & ((extent <= padded) | (problems["input_size"] == 0)).all(axis=1)
    return fits


def _is_problem(row: Array) -> bool:
    try:
        problem_from_row(row)
    except ProblemError:
        return False
    return True


def possible_numbers(rows: Array) -> Array:
    """Mark the rows of /measurements whose numbers agree with each other.

    Args:
        rows: of /measurements, whose statuses this version knows.
    """
    possible: Array = np.isin(rows["status"], _TIMED) == (rows["time_ns"] != NONE)
    for name in _NUMBERS:
        possible &= (rows[name] >= 0) | (rows[name] == NONE)
    return possible & (rows["stored_ns"] >= 0) & (rows["stored_ns"] <= LATEST_NS)
