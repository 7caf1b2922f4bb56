"""Segments: fronts of steps against a simulation of every choice, and against HiGHS."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import pulp
import pytest

from ucudnn.errors import PlanError
from ucudnn.solvers import Node, Option, OuterOption, SegmentTable, segment

# What runs, in the order of its forward; of an option around a division also what runs inside it.
Run = Option | tuple[OuterOption, tuple["Run", ...]]


def random_tree(
    draw: random.Random, depth: int = 3, scale: int = 1, *, may_nest: bool = False
) -> Node:
    """Few bytes and times, so that ties are common; negative bytes; no tree of too many choices."""
    inner = depth > 0 and draw.random() < (0.9 if depth == 3 else 0.4)
    width = draw.randint(1, 4) if inner else 0
    options = [
        Option(
            kept_bytes=draw.randint(-3, 9) * scale,
            peak_bytes=draw.randint(0, 12) * scale,
            time_ns=draw.randint(0, 9) * scale,
            choice=draw.random(),
        )
        for _ in range(draw.randint(0 if inner else 1, 3))
    ]
    children = tuple(random_tree(draw, depth - 1, scale, may_nest=may_nest) for _ in range(width))
    outer = []
    for _ in range(draw.randint(0, 2) if may_nest and depth > 0 else 0):
        # Its own children run inside it, or something else does.
        own = Node(children=children) if children and draw.random() < 0.5 else None
        outer.append(
            OuterOption(
                kept_bytes=draw.randint(-3, 6) * scale,
                peak_bytes=draw.randint(0, 9) * scale,
                time_ns=draw.randint(0, 6) * scale,
                choice=draw.random(),
                inside=own or random_tree(draw, depth - 1, scale, may_nest=True),
                beside_bytes=draw.randint(0, 4) * scale,
            )
        )
    stretches = []
    for _ in range(draw.randint(0, 3) if may_nest and children else 0):
        begin = draw.randint(0, width - 1)
        inside = random_tree(draw, min(1, depth - 1), scale, may_nest=True)
        stretches.append((begin, draw.randint(begin + 1, width), inside))
    return Node(tuple(options), children, tuple(outer), tuple(stretches))


def choices(node: Node) -> Iterator[tuple[Run, ...]]:
    """Every choice of options, in the order of their forward."""
    for option in node.options:
        yield (option,)
    for outer in node.outer:
        for inside in choices(outer.inside):
            yield ((outer, inside),)
    for nodes in rows(node) if node.children else ():
        for parts in product(*(list(choices(one)) for one in nodes)):
            yield tuple(option for part in parts for option in part)


def rows(node: Node, place: int = 0) -> Iterator[tuple[Node, ...]]:
    """Every way to run the children from a place on: each is its own node, or within a stretch."""
    if place == len(node.children):
        yield ()
        return
    for begin, end, one in ((place, place + 1, node.children[place]), *node.stretches):
        if begin == place:
            yield from ((one, *others) for others in rows(node, end))


def count(node: Node) -> int:
    inner = sum(prod(map(count, nodes)) for nodes in rows(node)) if node.children else 0
    return len(node.options) + inner + sum(count(outer.inside) for outer in node.outer)


def listed(choice: Sequence[Run]) -> Iterator[Option | OuterOption]:
    """The options of a choice one after the other, as `choose` returns them."""
    for one in choice:
        if isinstance(one, Option):
            yield one
        else:
            yield one[0]
            yield from listed(one[1])


def run(choice: Sequence[Run]) -> tuple[int, int]:
    """Peak and time of a step that is run, forward and then backward."""
    allocated = peak = time_ns = 0
    needs = []
    for one in choice:
        option, inside = (one, ()) if isinstance(one, Option) else one
        within, inner_ns = run(inside)
        beside = 0 if isinstance(option, Option) else option.beside_bytes
        needs.append((option.kept_bytes, max(option.peak_bytes, beside + within)))
        time_ns += option.time_ns + inner_ns
    for kept, most in needs:
        peak = max(peak, allocated + most)
        allocated += kept
        peak = max(peak, allocated)
    for kept, most in reversed(needs):
        allocated -= kept
        peak = max(peak, allocated + most)
    assert allocated == 0
    return peak, time_ns


def best(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The points than which none is at least as good in both."""
    distinct = sorted(set(points))
    return [
        (peak, time_ns)
        for peak, time_ns in distinct
        if not any(p <= peak and t <= time_ns and (p, t) != (peak, time_ns) for p, t in distinct)
    ]


def assert_is_front(table: SegmentTable, tree: Node) -> None:
    """Peaks rise, times fall, and the options of each point are a choice that needs just that."""
    front = table.front()
    assert front == best(front)
    # A list of options may be that of several choices: a child may run inside its parent or not.
    needs: dict[tuple[Option | OuterOption, ...], set[tuple[int, int]]] = {}
    for choice in choices(tree):
        needs.setdefault(tuple(listed(choice)), set()).add(run(choice))
    for peak, time_ns in front:
        assert (peak, time_ns) in needs[table.choose(peak)]
        assert table.time_ns(peak) == time_ns
    assert front[-1] in needs[table.choose()]
    assert table.time_ns() == front[-1][1]
    assert table.smallest_bytes == front[0][0]


def trees(seeds: range, scale: int = 1, *, may_nest: bool = False) -> Iterator[Node]:
    """Trees of at most a few hundred choices."""
    for seed in seeds:
        draw = random.Random(seed)
        while count(tree := random_tree(draw, scale=scale, may_nest=may_nest)) > 400:
            pass
        yield tree


EITHER = pytest.mark.parametrize("may_nest", [False, True])


@pytest.mark.slow
@EITHER
def test_the_front_is_that_of_all_choices_of_2000_trees(may_nest: bool) -> None:
    sizes, depths = [], []
    for tree in trees(range(2000), may_nest=may_nest):
        every = [run(choice) for choice in choices(tree)]
        table = segment(tree)
        assert table.front() == best(every)
        assert_is_front(table, tree)
        sizes.append(len(every))
        depths += [
            sum(type(one) is OuterOption for one in table.choose(peak)) for peak, _ in table.front()
        ]
    # That the trees are such that this says something.
    assert sum(size > 50 for size in sizes) > 300
    assert (sum(depth > 1 for depth in depths) > 50) is may_nest


@pytest.mark.slow
@EITHER
@pytest.mark.parametrize("resolution", [2, 3, 7, 1000, 10**30])
def test_a_resolution_costs_at_most_itself_for_each_option(resolution: int, may_nest: bool) -> None:
    dropped = 0
    for tree in trees(range(300), may_nest=may_nest):
        table = segment(tree, resolution)
        assert_is_front(table, tree)
        front = table.front()
        for choice in choices(tree):
            peak, time_ns = run(choice)
            most = peak + len([*listed(choice)]) * (resolution - 1)
            assert any(p <= most and t <= time_ns for p, t in front)
        exact = segment(tree).front()
        # The smallest peak and the least time are exact.
        assert (front[0][0], front[-1][1]) == (exact[0][0], exact[-1][1])
        assert len({peak // resolution for peak, _ in front[1:]}) == len(front[1:])
        dropped += len(exact) - len(front)
    assert dropped > 0


def optimum(root: Node, limit: int) -> int | None:
    """The least time within a limit by an integer program: a node runs in an option or inside."""
    problem = pulp.LpProblem("segments", pulp.LpMinimize)
    # PuLP before 3.3 has no add_variable, PuLP 4 has nothing else.
    add_variable = getattr(problem, "add_variable", pulp.LpVariable)
    numbers = iter(range(1 << 30))
    times, kept = [], []

    def add(node: Node, runs: object) -> None:
        uses = [add_variable(f"x{next(numbers)}", cat="Binary") for _ in node.options]
        inside = [add_variable(f"y{next(numbers)}", cat="Binary")] if node.children else []
        constraints.append(pulp.lpSum(uses + inside) == runs)
        transient = [o.peak_bytes * use for o, use in zip(node.options, uses, strict=True)]
        constraints.append(pulp.lpSum(kept + transient) <= limit)
        for child in node.children:
            add(child, inside[0])
        # After its children: what follows it comes after whichever of the two was chosen.
        for option, use in zip(node.options, uses, strict=True):
            kept.append(option.kept_bytes * use)
            times.append(option.time_ns * use)
        constraints.append(pulp.lpSum(kept) <= limit)

    constraints: list[object] = []
    add(root, 1)
    problem += pulp.lpSum(times)
    for constraint in constraints:
        problem += constraint
    outcome = problem.solve(pulp.HiGHS(msg=False, gapRel=0.0, gapAbs=0.0, threads=1))
    status = getattr(problem, "sol_status", getattr(outcome, "status", None))
    if status != 1:
        return None
    return round(sum(time.value() for time in times))


@pytest.mark.slow
def test_an_integer_program_finds_the_same_optimum() -> None:
    for seed in range(25):
        draw = random.Random(seed)
        root = Node(children=tuple(random_tree(draw) for _ in range(6)))
        table = segment(root)
        front = table.front()
        assert optimum(root, front[0][0] - 1) is None
        for peak, _ in draw.sample(front, min(3, len(front))):
            limit = peak + draw.randint(0, 3)
            assert optimum(root, limit) == table.time_ns(limit)


def test_a_module_that_frees_what_came_before_makes_room() -> None:
    first = Node((Option(10, 10, 1, "keeps"),))
    frees = Node((Option(-8, 0, 5, "frees"), Option(0, 0, 0, "does not")))
    last = Node((Option(6, 9, 1, "last"),))
    table = segment(Node(children=(first, frees, last)))
    assert table.front() == [(11, 7), (19, 2)]
    assert [option.choice for option in table.choose(18)] == ["keeps", "frees", "last"]


def test_a_single_module_is_its_own_front() -> None:
    options = (Option(4, 8, 9, "a"), Option(0, 8, 9, "b"), Option(0, 3, 20, "c"))
    table = segment(Node(options))
    assert table.front() == [(3, 20), (8, 9)]
    # What it keeps is larger than what is called its peak.
    assert segment(Node((Option(5, 3, 1, None),))).front() == [(5, 1)]


def test_of_equal_choices_the_option_that_stands_first_wins() -> None:
    def node(name: str, *children: Node) -> Node:
        return Node((Option(1, 2, 3, f"{name}0"), Option(1, 2, 3, f"{name}1")), children)

    table = segment(Node(children=(node("a"), node("b"))))
    assert [option.choice for option in table.choose()] == ["a0", "b0"]
    assert [option.choice for option in segment(node("whole", node("part"))).choose()] == ["whole0"]
    # Seven of each peak, the smallest last: a sort that is not stable may mix them up.
    many = Node(tuple(Option(0, (50 - place) // 7, 3, place) for place in range(50)))
    assert [option.choice for option in segment(many).choose()] == [44]


def test_a_limit_below_every_choice_says_what_would_fit() -> None:
    one = Node((Option(2 << 20, 3 << 20, 5, None),))
    table = segment(Node(children=(one, one)), resolution_bytes=1 << 22)
    assert table.time_ns((5 << 20) - 1) is None
    with pytest.raises(
        PlanError, match="limit of 1 KiB; the smallest needs 5 MiB; raise"
    ) as caught:
        table.choose(1 << 10)
    assert caught.value.smallest_bytes == table.smallest_bytes == 5 << 20
    assert len(table.choose(5 << 20)) == 2


def test_options_inside_follow_the_one_around_them() -> None:
    def node(name: str, *outer: OuterOption) -> Node:
        return Node((Option(4, 6, 2, name),), outer=outer)

    parts = Node(children=(Node((Option(1, 2, 2, "a"),)), Node((Option(1, 2, 2, "b"),))))
    half = node("half", OuterOption(1, 2, 3, "in half", parts, beside_bytes=1))
    whole = node("whole", OuterOption(1, 3, 9, "around", Node(children=(half, node("c")))))
    table = segment(Node(children=(node("first"), whole, node("last"))))
    # As a whole, the last one has 4 + 4 beside its 6 bytes. Around its inside, the second one has 4
    # beside the 1 + 6 of "c", and the last one 4 + 1 beside its 6.
    assert table.front() == [(11, 22), (14, 6)]
    chosen = [option.choice for option in table.choose(13)]
    assert chosen == ["first", "around", "in half", "a", "b", "c", "last"]
    assert [option.choice for option in table.choose()] == ["first", "whole", "last"]


def test_stretches_may_overlap() -> None:
    leaf = Node((Option(4, 4, 1, "leaf"),))
    stretches = [
        (begin, begin + size, Node((Option(1, 4 * size, 2 * size, f"{begin}+{size}"),)))
        for size in (2, 3)
        for begin in range(5 - size)
    ]
    table = segment(Node(children=(leaf,) * 4, stretches=tuple(stretches)))
    # The first two together keep 1, so that the others fit in 1 + 4 + 4. "1+2" needs 4 + 8.
    assert table.front() == [(9, 6), (16, 4)]
    assert [option.choice for option in table.choose(12)] == ["0+2", "leaf", "leaf"]
    assert [option.choice for option in table.choose()] == ["leaf"] * 4


def test_an_inside_that_options_share_is_solved_once() -> None:
    # Each module may run around the one inside it in two ways: solved anew, 2^100 times.
    node = Node((Option(3, 5, 1, "leaf"),))
    for time_ns in (2, 1) * 50:
        outer = [OuterOption(1, peak, time_ns, "around", node) for peak in (2, 3)]
        node = Node(outer=tuple(outer))
    table = segment(node)
    assert table.front() == [(5, 151)]
    assert len(table.choose()) == 101


@EITHER
@pytest.mark.parametrize("scale", [10**6, 10**18, 10**30])
def test_numbers_do_not_overflow(scale: int, may_nest: bool) -> None:
    small_trees = trees(range(50), may_nest=may_nest)
    large_trees = trees(range(50), scale, may_nest=may_nest)
    for small, large in zip(small_trees, large_trees, strict=True):
        front = segment(large).front()
        assert front == [(p * scale, t * scale) for p, t in segment(small).front()]
        assert all(type(value) is int for point in front for value in point)


def test_a_deep_tree_and_a_long_one_are_solved() -> None:
    leaf = Node((Option(1, 2, 1, "leaf"),))
    deep = leaf
    for _ in range(100):
        deep = Node((Option(0, 50, 200, "whole"),), (leaf, deep))
    assert segment(deep).front() == [(50, 200), (102, 101)]
    table = segment(Node(children=(leaf,) * 1000))
    assert table.front() == [(1001, 1000)]
    assert len(table.choose()) == 1000
