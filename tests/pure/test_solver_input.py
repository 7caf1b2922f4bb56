"""Solvers refuse bad input in one sentence, and never answer with a wrong plan."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from ucudnn.errors import ConfigError, PlanError
from ucudnn.solvers import Item, Node, Option, OuterOption, balance, divide, reuse, segment

ONE = Item(2, 1 << 20, 5, "gemm")
LEAF = Node((Option(0, 0, 0, None),))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: reuse([], 4), "items must not be empty"),
        (lambda: reuse([], 4, first=[], accumulate=[]), "items must not be empty"),
        (lambda: reuse([ONE], 0), "batch must be an int of at least 1, got 0"),
        (lambda: reuse([ONE], 2.0), "batch must be an int of at least 1, got 2.0"),
        (lambda: reuse([(2, 0, 5, "a")], 4), "items must hold ucudnn.solvers.Item values"),
        (lambda: reuse([ONE], 4, first=[ONE]), "got no accumulate; pass accumulate=()"),
        (lambda: reuse([ONE], 4, accumulate=[ONE]), "got no first; pass first=()"),
        (lambda: reuse([ONE], 4, launch_ns=-1), "launch_ns must be an int of at least 0, got -1"),
        (lambda: reuse([ONE], 4).front(5), "n must be at most .*4.*, got 5; solve for"),
        (lambda: reuse([ONE], 4).time_ns(0), "n must be an int of at least 1, got 0"),
        (lambda: reuse([ONE], 4).split(2, -1), "limit, .* at least 0, got -1"),
        (lambda: reuse([ONE], 4).split(2, 1e9), "limit, .* at least 0, got 1000000000.0"),
        (lambda: divide([], 9), "fronts must not be empty"),
        (lambda: divide([[]], 9), "front 0 must have at least one"),
        (lambda: divide([[(0, 1)], [7]], 9), "front 1 must hold .* pairs, got 7"),
        (lambda: divide([[(0, 1, 2)]], 9), r"front 0 must hold .* pairs, got \(0, 1, 2\)"),
        (lambda: divide([[(-1, 1)]], 9), "workspace_bytes in front 0 .* at least 0, got -1"),
        (lambda: divide([[(0, 0)]], 9), "time_ns in front 0 .* at least 1, got 0"),
        (lambda: divide([[(0, 0.5)]], 9), "time_ns in front 0 .* got 0.5"),
        (lambda: divide([[(0, 1)]], -1), "total_bytes .* at least 0, got -1"),
        (lambda: divide([[(0, 1)]], 1e9), "total_bytes .* got 1000000000.0"),
        (lambda: divide([[(0, 1)]], 9, "glpk"), "one of auto, exact, highs, cbc, got 'glpk'"),
        (lambda: balance([], 4), "times must not be empty"),
        (lambda: balance([[1, 2]], 0), "batch must be an int of at least 1, got 0"),
        (lambda: balance([[1, 0]], 2), "times of device 0 must be an int of at least 1, got 0"),
        (lambda: balance([[1], [1.5]], 2), "times of device 1 .* got 1.5"),
        (lambda: segment([LEAF]), r"root must be a ucudnn.solvers.Node, got \[Node"),
        (lambda: segment(LEAF, 0), "resolution_bytes must be an int of at least 1, got 0"),
        (lambda: segment(LEAF, 1e6), "resolution_bytes .* got 1000000.0"),
        (lambda: segment(LEAF).choose(-1), "limit, .* at least 0, got -1"),
        (lambda: segment(LEAF).time_ns(1.5), "limit, .* at least 0, got 1.5"),
        (Node, "a node must have an option or a child, got neither"),
        (lambda: Node([LEAF]), "options of a node must be a tuple of .*Option values, got"),
        (lambda: Node(children=(1,)), r"children of a node must be .*Node values, got \(1,\)"),
        (lambda: Option(0.5, 0, 1, None), "kept_bytes of an option must be an int, got 0.5"),
        (lambda: Option(0, -1, 1, None), "peak_bytes of an option .* at least 0, got -1"),
        (lambda: OuterOption(0, 0, 0, None, 1), "inside of an option must be .*Node, got 1"),
        (lambda: OuterOption(0, -1, 0, None, LEAF), "peak_bytes of an option .* got -1"),
        (lambda: OuterOption(0, 0, 0, None, LEAF, -1), "beside_bytes of an option .* got -1"),
        (lambda: Node(outer=(LEAF,)), "outer of a node must be .*OuterOption values, got"),
        (
            lambda: Node(children=(LEAF,), stretches=((0, 2, LEAF),)),
            r"a stretch of a node must have two places among its 1 children and .*got \(0, 2, Node",
        ),
        (lambda: Option(0, 0, True, None), "time_ns of an option .* got True"),
        (lambda: Item(0, 0, 1, "a"), "batch of an item .* at least 1, got 0"),
        (lambda: Item(1, -1, 1, "a"), "workspace_bytes of an item .* at least 0, got -1"),
        (lambda: Item(1, 0, 0, "a"), "time_ns of an item .* at least 1, got 0"),
        (lambda: Item(1, 0, 1.5, "a"), "time_ns of an item .* got 1.5"),
        (lambda: Item(True, 0, 1, "a"), "batch of an item .* got True"),
        (lambda: Item(1, 0, 1, ""), "algorithm of an item must be a non-empty string"),
        (lambda: Item(1, 0, 1, "a", rank=-1), "rank of an item .* got -1"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_limit_below_every_item_says_what_would_fit() -> None:
    table = reuse([ONE, Item(4, 5 << 20, 6, "fft")], 8)
    assert table.time_ns(8, 1000) is None
    with pytest.raises(
        PlanError, match=r"limit of 1000 B; the smallest needs 1 MiB .*2, gemm"
    ) as e:
        table.split(8, 1000)
    assert e.value.smallest_bytes == table.smallest_bytes(8) == 1 << 20


def test_a_batch_that_no_item_reaches_says_so() -> None:
    table = reuse([ONE], 5)
    for n in (1, 3, 5):
        assert table.time_ns(n) is None
        assert table.front(n) == []
        assert table.smallest_bytes(n) is None
        with pytest.raises(PlanError, match="must be a sum of micro-batch sizes") as caught:
            table.split(n)
        assert caught.value.smallest_bytes is None
    assert reuse([Item(8, 0, 1, "a")], 4).time_ns(4) is None


def test_a_pool_below_every_division_says_what_would_fit() -> None:
    fronts = [[(4, 9), (8, 1)], [(5, 7)], [(6, 1)]]
    with pytest.raises(
        PlanError, match=r"3 kernel\(s\), 15 bytes .*, got total_bytes=14"
    ) as caught:
        divide(fronts, 14)
    assert caught.value.smallest_bytes == 15


def test_devices_that_cannot_add_up_to_the_batch_say_so() -> None:
    with pytest.raises(PlanError, match="must sum up to the global batch 5"):
        balance([[None, 3, None, 4], [None, 3]], 5)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_a_solver_without_pulp_names_what_to_install(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pulp", None)
    with pytest.raises(ConfigError, match=f"solver='{solver}' is not installed; run `pip install"):
        divide([[(0, 9), (8, 5)]], 9, solver)
    assert divide([[(0, 9), (8, 5)]], 9, "auto").gap_ns == 0
