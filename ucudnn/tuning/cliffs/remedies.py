"""A plan of what the scan for cliffs proposes. Pure."""

from __future__ import annotations

from ucudnn.problem import Problem
from ucudnn.split import BY_BATCH, DEFAULT_ALGORITHM, KernelPlan, Split, Timing


def remedied_kernel(
    problem: Problem, layers: tuple[str, ...], split: Split, timing: Timing, default: Timing
) -> KernelPlan:
    """Plan a kernel by a split of its batch; smaller batches are left to torch.

    >>> from ucudnn.split import Step
    >>> problem, timing = Problem("fprop", 4, 2, 2, (9,), (1,)), Timing(1, 0, 0, 1)
    >>> split = Split("batch", (Step(2, "gemm"), Step(2, "gemm")))
    >>> plan = remedied_kernel(problem, ("a",), split, timing, timing)
    >>> print(plan.split(4), "and", plan.split(3))
    2x2 gemm and 3 torch_default

    Args:
        problem: the kernel.
        layers: names of the layers that run it.
        split: of one step, or of several of one size and algorithm.
        timing: of the split.
        default: of torch's own convolution.
    """
    step, batch = split.steps[0], problem.batch
    names = tuple(dict.fromkeys((DEFAULT_ALGORITHM, step.algorithm)))
    index = names.index(step.algorithm)
    is_split = len(split.steps) > 1
    return KernelPlan(
        problem=problem,
        layers=layers,
        algorithms=names,
        alone=(*(0 for _ in range(1, batch)), BY_BATCH if is_split else index),
        last=tuple(
            (step.size, index) if is_split and n % step.size == 0 else (0, -1)
            for n in range(1, batch + 1)
        ),
        predicted_time_ns=timing.time_ns,
        timing=timing,
        default=default,
        notes=() if split.is_default else ("proposed by a scan for cliffs",),
    )
