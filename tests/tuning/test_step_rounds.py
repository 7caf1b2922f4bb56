"""What rounds of steps show: of whole steps, and of the kernels inside them."""

from __future__ import annotations

from dataclasses import replace

import by_hand
import pytest
from by_hand import plan_of

from ucudnn.tuning.step_rounds import StepTimes, raced_inside


def kernel(size, layout="nchw"):
    return by_hand.kernel(size, batch=8, width=3, layout=layout)


def rounds(steps_ns, **kernels_ns):
    """One step per round, with times of kernels of sizes such as k8."""
    problems = {name: kernel(int(name[1:])).problem for name in kernels_ns}
    return [
        StepTimes(step_ns, {problems[name]: times[i] for name, times in kernels_ns.items()})
        for i, step_ns in enumerate(steps_ns)
    ]


NOISY, QUIET = [100, 130, 100], [110, 100, 120]


def test_small_gains_count_together():
    plan = plan_of(kernel(8), kernel(9))
    by_torch = rounds(NOISY, k8=[10, 10, 10], k9=[10, 10, 10])
    # Of each kernel one round is slower; of both together none.
    by_plan = rounds(QUIET, k8=[8, 8, 11], k9=[8, 11, 8])
    raced = raced_inside(by_torch, by_plan, plan, plan.kernels)
    assert raced.pays
    assert raced.race.inside == (0.95, 0.8, 0.95)
    # and the other way round
    assert not raced_inside(by_plan, by_torch, plan, plan.kernels).pays


def test_a_kernel_stays_that_is_faster_in_most_steps():
    plan = plan_of(kernel(8), kernel(9))
    by_torch = rounds(NOISY, k8=[10, 10, 10], k9=[10, 10, 10])
    by_plan = rounds(QUIET, k8=[8, 8, 11], k9=[9, 12, 12])
    raced = raced_inside(by_torch, by_plan, plan, plan.kernels)
    assert not raced.pays
    assert raced.faster == {kernel(8).problem}


@pytest.mark.parametrize(
    ("step_ns", "plan_ns", "pays", "faster"),
    [
        (NOISY, [9, 9, 9], True, {8}),
        (NOISY, [11, 9, 9], False, {8}),
        (NOISY, [11, 9, 11], False, set()),
        (NOISY, [12, 12, 12], False, set()),
        # Steps that are faster in every round by chance: the kernels are not.
        ([130] * 3, [12, 12, 12], False, set()),
        ([130] * 3, [12, 9, 12], True, set()),
        # Steps that are slower in every round: because of the kernel, or not.
        ([50, 50, 50], [12, 12, 12], False, set()),
        ([50, 50, 50], [12, 9, 12], False, None),
        ([50, 50, 50], [9, 9, 9], False, None),
        # Two rounds show only what loses much, in steps and inside them.
        ([100, 100], [12, 12], True, None),
        ([50, 50], [12, 12], False, None),
        ([50, 50], [12, 9], False, None),
        ([50, 50], [9, 9], True, None),
    ],
)
def test_what_a_kernel_gains_inside_steps(step_ns, plan_ns, pays, faster):
    plan, count = plan_of(kernel(8)), len(step_ns)
    by_torch = rounds(step_ns, k8=[10] * count)
    by_plan = rounds(QUIET[:count], k8=plan_ns)
    raced = raced_inside(by_torch, by_plan, plan, plan.kernels)
    assert raced.pays == pays
    sizes = None if raced.faster is None else {one.input_size[0] for one in raced.faster}
    assert sizes == faster


def test_kernels_that_were_not_timed_in_every_step_show_nothing():
    plan = plan_of(kernel(8))
    by_torch, by_plan = rounds(NOISY, k8=[10] * 3), rounds(QUIET, k8=[5] * 3)
    by_plan[1] = replace_kernels(by_plan[1], {})
    raced = raced_inside(by_torch, by_plan, plan, plan.kernels)
    assert not raced.pays
    assert raced.faster is None
    assert raced.race.inside is None


def replace_kernels(times, kernels_ns):
    return times._replace(kernels_ns=kernels_ns)


def test_smaller_batches_and_single_samples_in_channels_last_count_for_their_kernel():
    last = kernel(8, layout="nhwc")
    plan = plan_of(last)
    for batch, layout in ((8, "nhwc"), (3, "nhwc"), (1, "nchw")):
        problem = replace(last.problem, batch=batch, layout=layout)
        by_torch, by_plan = (
            [StepTimes(ns, {problem: time_ns}) for ns in steps]
            for steps, time_ns in ((NOISY, 10), (QUIET, 5))
        )
        assert raced_inside(by_torch, by_plan, plan, [last]).race.inside == (0.5, 0.5, 0.5)
    # of another layer
    other = {kernel(7).problem: 5}
    steps = [StepTimes(ns, other) for ns in NOISY]
    assert raced_inside(steps, steps, plan, [last]).race.inside is None
