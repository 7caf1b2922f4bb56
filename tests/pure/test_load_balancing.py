"""Shares of a global batch: the smallest makespan there is, for times that need not rise."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucudnn.errors import PlanError
from ucudnn.solvers import balance

TIMES = st.lists(
    st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=3
)


@settings(max_examples=300)
@given(TIMES, st.integers(1, 9), st.sampled_from([1, 10**18]))
def test_no_shares_finish_earlier_or_sooner_in_sum(
    times: list[list[int | None]], batch: int, scale: int
) -> None:
    times = [[None if t is None else t * scale for t in row] for row in times]
    rows = [{0: 0, **{n: t for n, t in enumerate(row, 1) if t is not None}} for row in times]
    costs = [
        (max(taken), sum(taken))
        for sizes in product(*rows)
        if sum(sizes) == batch
        for taken in [[row[size] for row, size in zip(rows, sizes, strict=True)]]
    ]
    if not costs:
        with pytest.raises(PlanError, match=f"global batch {batch}"):
            balance(times, batch)
        return
    shares = balance(times, batch)
    assert sum(shares.sizes) == batch
    assert shares.times_ns == tuple(row[size] for row, size in zip(rows, shares.sizes, strict=True))
    assert (shares.time_ns, sum(shares.times_ns)) == min(costs)


def test_equal_devices_share_equally() -> None:
    times = [[3 * n for n in range(1, 65)]] * 4
    assert balance(times, 64).sizes == (16, 16, 16, 16)
