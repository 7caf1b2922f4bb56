"""Splits along both axes, against every nested split there is, on a device whose costs are given.

The costs of a chunk depend on its rows and its samples. Torch's own convolution fits no limit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from ucudnn import cache as caches
from ucudnn.axis import RowAxis, axis_of
from ucudnn.backends import open_backend
from ucudnn.check import check
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.execution.execute import bind
from ucudnn.plan import Plan
from ucudnn.problem import OPS, Problem
from ucudnn.slabs import row_count
from ucudnn.split import Split, Step, Timing
from ucudnn.tuning.confirmation import Finalist, choose
from ucudnn.tuning.rationale import rationales
from ucudnn.tuning.tuner import tune_problems

MIB, MS = 1 << 20, 1_000_000
N = 4
# 7 rows of y and of dx, so that there are slabs of 1, 2, 3 and 4 rows.
CONV = Problem("fprop", N, 2, 2, (7, 3), (3, 3), padding=((1, 1), (1, 1)))

Charge = Callable[[Problem], tuple[int, int]]
# The workspace and the time of a split.
Costs = list[tuple[int, int]]


def charge(ms: int, fixed_ms: int, mib: int, per_sample_ms: int = 0) -> Charge:
    """Time and workspace that grow with the rows of all samples, and a time per call."""

    def of(problem: Problem) -> tuple[int, int]:
        rows = row_count(problem) * problem.batch
        return MS * (fixed_ms + per_sample_ms * problem.batch + ms * rows), mib * MIB * rows

    return of


COSTS = {
    "torch_default": charge(9, 0, 100),
    "greedy": charge(1, 2, 4),
    "frugal": charge(3, 1, 1),
}


@pytest.fixture
def nested(scripted):
    """A function that installs a device with these costs."""

    def install(costs: dict[str, Charge] | None = None):
        by_name = COSTS if costs is None else costs
        backend = scripted(**dict.fromkeys(by_name, lambda _: (MS, 0)))
        backend.charged = lambda algorithm, problem: by_name[algorithm](problem)
        return backend

    return install


def tune(problem: Problem, **settings: object) -> Plan:
    return tune_problems([("layer", problem)], Config(**settings))


def combinations(chunks: Costs, sizes: list[int], extent: int) -> Iterator[tuple[int, int]]:
    """The costs of every multiset of chunks with an extent altogether."""
    if extent == 0:
        yield 0, 0
    for place, (size, (workspace, time_ns)) in enumerate(zip(sizes, chunks, strict=True)):
        if size <= extent:
            for more, rest_ns in combinations(chunks[place:], sizes[place:], extent - size):
                yield max(workspace, more), time_ns + rest_ns


def by_slabs(problem: Problem, costs: dict[str, Charge]) -> Costs:
    """Every split of a micro-batch into slabs."""
    axis = RowAxis(problem)
    ways = [(size, of(axis.part(size))) for size in axis.sizes("all") for of in costs.values()]
    chunks = [(workspace, time_ns) for _, (time_ns, workspace) in ways]
    return list(combinations(chunks, [size for size, _ in ways], row_count(problem)))


def fastest(splits: Costs, limit: int) -> int | None:
    return min((time_ns for workspace, time_ns in splits if workspace <= limit), default=None)


def expected_ns(problem: Problem, costs: dict[str, Charge], limit: int) -> int | None:
    """Brute force: the time of the fastest split that fits, None where none does.

    The batch is any sum of micro-batches of 1, 2 and 4 samples, each of which has its own slabs.
    Where micro-batches fit undivided only these and slabs of all samples are allowed.
    """
    sizes = [1, 2, 4]
    undivided = [(problem.with_batch(n), of) for n in sizes for of in costs.values()]
    chunks = [of(part)[::-1] for part, of in undivided]
    whole = list(combinations(chunks, [part.batch for part, _ in undivided], problem.batch))
    if fastest(whole, limit) is not None:
        whole += by_slabs(problem, costs)
        return fastest(whole, limit)
    micro_batches = {n: fastest(by_slabs(problem.with_batch(n), costs), limit) for n in sizes}
    fitting = {n: time_ns for n, time_ns in micro_batches.items() if time_ns is not None}
    chunks = [(0, time_ns) for time_ns in fitting.values()]
    return fastest(list(combinations(chunks, list(fitting), problem.batch)), limit)


def random_costs(seed: int) -> dict[str, Charge]:
    chance = random.Random(seed)

    def one() -> Charge:
        return charge(*(chance.randint(1, 9) for _ in range(3)), chance.randint(0, 9))

    return {"torch_default": charge(9, 9, 100), "first": one(), "second": one()}


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("seed", range(8))
def test_the_plan_is_the_fastest_of_all_nested_splits(nested, op, seed):
    problem = Problem(**{**CONV.to_dict(), "op": op})
    costs = random_costs(seed)
    seen = set()
    for limit_mib in (1, 2, 4, 7, 12, 20, 30):
        nested(costs)
        expected = expected_ns(problem, costs, limit_mib * MIB)
        if expected is None:
            with pytest.raises(PlanError, match="the smallest needs"):
                tune(problem, workspace_limit=limit_mib * MIB)
            continue
        (kernel,) = tune(problem, workspace_limit=limit_mib * MIB).kernels
        assert kernel.timing.workspace_bytes <= limit_mib * MIB
        assert kernel.predicted_time_ns == kernel.timing.time_ns
        # Within 2 % measuring ends, and a race is a tie.
        assert expected <= kernel.timing.time_ns <= 1.04 * expected
        seen.add(kernel.split(N).samples)
    assert seen & {1, 2}


def test_a_call_is_cut_along_both_axes_where_one_axis_alone_does_not_fit(nested):
    nested()
    # One row of four samples takes 4 MiB, and one sample 7.
    plan = tune(CONV, workspace_limit="3MiB")
    assert str(plan.split(CONV)) == "slabs of 3 frugal + 2x2 frugal, 1 sample at a time"
    (kernel,) = plan.kernels
    assert kernel.timing.workspace_bytes == 3 * MIB
    # Every smaller batch is the same, sample by sample.
    assert [kernel.split(n).steps for n in range(1, N)] == [kernel.split(N).steps] * (N - 1)


def test_a_nested_split_competes_with_slabs_of_all_samples(nested):
    """In 4 MiB fit one row of four samples, two rows of two, and four rows of one."""
    costs = {"torch_default": COSTS["torch_default"]}
    # Seven calls for all samples, or two for each of them.
    nested({**costs, "frugal": charge(1, 9, 1)})
    assert tune(CONV, workspace_limit="4MiB").split(CONV).samples == 0
    nested({**costs, "lean": charge(1, 0, 1, per_sample_ms=9)})
    assert tune(CONV, workspace_limit="4MiB").split(CONV).samples == 1


def test_a_large_batch_is_cut_into_few_samples_at_a_time(nested):
    nested({"torch_default": COSTS["torch_default"], "frugal": charge(3, 9, 1)})
    problem = CONV.with_batch(48)
    # Seven calls for four samples, two for one, or four for two.
    for policy in ("powers-of-two", "all"):
        assert tune(problem, workspace_limit="5MiB", policy=policy).split(problem).samples == 4


@pytest.mark.parametrize(
    "settings",
    [{}, {"workspace_limit": "7MiB"}, {"workspace_limit": "1GiB"}],
    ids=str,
)
def test_nothing_nested_is_measured_where_a_micro_batch_fits(nested, settings):
    backend = nested()
    charged, parts = backend.charged, list[Problem]()

    def noted(algorithm, problem):
        parts.append(problem)
        return charged(algorithm, problem)

    backend.charged = noted
    plan = tune(CONV, **settings)
    assert plan.split(CONV).samples == 0
    assert all(part.batch == N or part.input_size == CONV.input_size for part in parts)


def test_a_policy_without_splits_excludes_nested_ones(nested):
    nested()
    with pytest.raises(PlanError, match="smallest needs .*frugal"):
        tune(CONV, workspace_limit="3MiB", policy="undivided")


def test_a_limit_that_nothing_fits_names_the_smallest_nested_split(nested):
    nested()
    named = r"the smallest needs 1 MiB \(slabs of 7x1 frugal, 1 sample at a time\)"
    with pytest.raises(PlanError, match=named) as error:
        tune(CONV, workspace_limit=MIB - 1)
    plan = tune(CONV, workspace_limit=error.value.smallest_bytes)
    assert plan.split(CONV).samples == 1
    assert plan.workspace_bytes == MIB


def test_what_a_whole_call_needs_beyond_its_chunks_leads_to_smaller_ones(nested, tmp_path):
    backend = nested()
    assert {step.size for step in tune(CONV, workspace_limit="3MiB").split(CONV).steps} == {2, 3}
    # Not known before: calls of several chunks need one more.
    measured = backend.workspace_bytes

    def workspace_bytes(run, parts):
        listed = list(parts)
        return measured(run, listed) + MIB * (len(listed) > 1)

    backend.workspace_bytes = workspace_bytes
    plan = tune(CONV, workspace_limit="3MiB", cache=tmp_path)
    assert plan.workspace_bytes == 3 * MIB
    split = plan.split(CONV)
    assert max(step.size for step in split.steps) * split.samples == 2


def test_a_second_tune_measures_nothing(nested, tmp_path):
    backend = nested()
    first = tune(CONV, workspace_limit="3MiB", cache=tmp_path)
    before = backend.clock
    assert tune(CONV, workspace_limit="3MiB", cache=tmp_path) == first
    assert backend.clock == before
    replayed = tune(CONV, workspace_limit="3MiB", cache=tmp_path, backend="recorded")
    assert replayed.split(CONV) == first.split(CONV)
    assert replayed.kernels[0].timing == first.kernels[0].timing


def test_the_curve_goes_down_to_the_smallest_nested_split(nested):
    nested()
    curve = tune(CONV, curve=True, workspace_limit="1GiB").curve
    assert curve is not None
    assert curve.by_workspace[0] == (MIB, expected_ns(CONV, COSTS, MIB))


def test_the_front_of_a_report_has_nested_splits(nested, tmp_path):
    nested()
    cache = str(tmp_path / "cache")
    plan = tune(CONV, workspace_limit="3MiB", cache=cache, effort="thorough")
    with caches.open(cache, "r") as opened:
        (rationale,) = rationales(plan, opened)
    # By brute force: what fits that limit is nested, and was measured.
    within = [time_ns for size, time_ns in rationale.front if size <= 3 * MIB]
    assert min(within) == expected_ns(CONV, COSTS, 3 * MIB) == plan.kernels[0].timing.time_ns
    # A wide batch, of which no slabs of all samples are ever cut.
    wide, limit = CONV.with_batch(16), 3 * MIB
    plan = tune(wide, workspace_limit=limit, cache=cache)
    assert plan.split(wide).samples
    with caches.open(cache, "r") as opened:
        (rationale,) = rationales(plan, opened)
    assert min(time_ns for size, time_ns in rationale.front if size <= limit) == (
        plan.kernels[0].timing.time_ns
    )


@pytest.mark.parametrize(("extra_mib", "covered"), [(0, True), (1, True), (4, False)])
def test_samples_that_another_implementation_computes_are_planned_where_they_were_timed(
    nested, extra_mib, covered
):
    """One sample runs another implementation, which takes more; two take three rows in 6 MiB."""
    usual = charge(3, 9, 1)

    def of(problem):
        time_ns, workspace = usual(problem)
        return time_ns, workspace + (problem.batch == 1) * extra_mib * MIB

    backend = nested({"torch_default": COSTS["torch_default"], "frugal": of})
    backend.kernels = {("frugal", 1): "another"}
    plan = tune(CONV, workspace_limit="6MiB")
    (kernel,) = plan.kernels
    assert plan.split(CONV).samples == 2
    assert [kernel.covers(n) for n in (1, 2, 3, 4)] == [covered, True, covered, True]
    for n in (n for n in range(1, N + 1) if kernel.covers(n)):
        call = bind(backend, CONV.with_batch(n), kernel.split(n))
        # the chunks add up to all of it, and each fits
        assert all(of(chunk.problem)[1] <= 6 * MIB for chunk in call.chunks)
        rows = [row_count(chunk.problem) * chunk.problem.batch for chunk in call.chunks]
        assert sum(rows) == 7 * n


def test_ties_of_nested_splits_count_the_chunks_of_all_micro_batches():
    """Two calls of equal time and workspace: three chunks beat two for each of four samples."""
    timing, samples = Timing(90, 0, 64, 9), (90,) * 9
    flat = Split("spatial", (Step(3, "gemm"), Step(2, "gemm"), Step(2, "gemm")))
    deep = Split("spatial", (Step(4, "gemm"), Step(3, "gemm")), samples=1)
    entries = [
        Finalist(split, timing, samples, repetitions=axis_of(CONV, split).repetitions)
        for split in (deep, flat)
    ]
    assert [entry.chunk_count for entry in entries] == [8, 3]
    assert choose(entries, None).split == flat


def test_a_race_says_how_often_the_steps_run(nested, monkeypatch):
    """Raced and predicted alike: as many chunks as the call computes."""
    backend = nested({"torch_default": COSTS["torch_default"], "frugal": charge(3, 9, 1)})
    seen = []

    def noted(finalists, *more):
        seen.extend(finalists)
        return choose(finalists, *more)

    monkeypatch.setattr("ucudnn.tuning.planner.choose", noted)
    tune(CONV, workspace_limit="4MiB")
    assert any(entry.split.samples for entry in seen)
    for entry in seen:
        call = bind(backend, CONV, entry.split)
        assert entry.chunk_count == len(call.chunks)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_a_volume_in_float64_keeps_a_limit_that_no_sample_and_no_plane_fits(op, tmp_path):
    """The real thing: one plane of three samples takes more than 8 MiB, and so does one sample."""
    sizes = ((16, 16, 16), (3, 3, 3), (1, 1, 1), ((1, 1),) * 3)
    problem, limit = Problem(op, 3, 32, 32, *sizes, dtype="float64"), 8 * MIB
    made = tune(problem, workspace_limit=limit, cache=tmp_path / "cache")
    made.save(tmp_path / "volume.plan.json")
    plan = Plan.load(tmp_path / "volume.plan.json")
    assert plan.hash == made.hash
    backend = open_backend("torch_cpu")
    for batch in (3, 2, 1):
        part = problem.with_batch(batch)
        assert plan.covers(part)
        call = bind(backend, part, plan.split(part))
        operands = backend.operands(part, batch)
        assert backend.workspace_bytes(partial(call, *operands), call.parts) <= limit
    if op == "dgrad":
        assert plan.split(problem).samples == 1
    whole = next(finding for finding in check(plan, canaries=0) if finding.about == "build")
    assert whole.is_true, whole.said
