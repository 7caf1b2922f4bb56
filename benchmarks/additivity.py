"""Whether times add up: the chunks of each kernel's plan and the whole call, timed in turn.

    ucudnn tune MODEL ... -o PLAN
    python benchmarks/additivity.py PLAN [--rounds 21]

What a plan predicts and what its finals measured are minutes apart, and a busy machine changes in
minutes. Here each round times every chunk of a split as tuning does and the whole call as finals
do: a ratio compares times of one moment. The same call timed twice says what is noise.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from ucudnn.axis import AbstractAxis, axis_of
from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.benchmark.bench import Arm
from ucudnn.benchmark.protocol import (
    FINALS,
    AbstractLoop,
    ChunkLoop,
    Protocol,
    Ring,
    Sampler,
    WholeLoop,
)
from ucudnn.benchmark.rounds import Entrant, run_rounds
from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.execution.execute import bind
from ucudnn.measurement import positions, role_of
from ucudnn.plan import KernelPlan, Plan, Split
from ucudnn.units import format_ns

NEAR = (0.95, 1.05)


@dataclass(frozen=True)
class Additivity:
    """Of one kernel's split: (median, low, high) of paired ratios, with 95 % intervals.

    Args:
        kernel: and its split, as text.
        time_ns: of the whole call, the median.
        predicted: the sum of the chunks over the whole call.
        same: the whole call over itself, timed twice in each round.
    """

    kernel: str
    time_ns: int
    predicted: tuple[float, float, float]
    same: tuple[float, float, float]

    @property
    def is_near(self) -> bool:
        """Whether the prediction is within 5 %."""
        return NEAR[0] <= self.predicted[0] <= NEAR[1]


def chunks(axis: AbstractAxis, split: Split) -> Counter[Arm]:
    """The chunks of a split as tuning times them, and how many there are of each."""
    places = positions(len(split.chunks))
    return Counter(
        Arm(axis.size_of(chunk), chunk.algorithm, role_of(axis.problem, place))
        for chunk, place in zip(split.chunks, places, strict=True)
    )


def additivity(backend: AbstractBackend, kernel: KernelPlan, rounds: int) -> Additivity:
    """Time the chunks of a kernel's split and the whole call, twice, in the same rounds."""
    problem, split = kernel.problem, kernel.split(kernel.problem.batch)
    axis = axis_of(problem, split)
    ring = Ring.allocate(backend, problem)
    counts = chunks(axis, split)
    loops: list[AbstractLoop] = []
    for arm in counts:
        part = axis.part(arm.size)
        executable = backend.executable(part, arm.algorithm)
        loops.append(ChunkLoop(ring, executable, part, arm.role))
    loops += [WholeLoop(ring, bind(backend, problem, split)) for _ in range(2)]
    samplers = [Sampler(loop, backend) for loop in loops]
    for sampler in samplers:
        sampler.warm_up(FINALS)
    protocol = Protocol(least_rounds=rounds, most_rounds=rounds, lapped=(), repeats=rounds)
    results = run_rounds(backend, [Entrant(one.sample_ns) for one in samplers], protocol)
    *parts, whole, again = (result.samples for result in results)
    sums = [
        sum(count * time_ns for count, time_ns in zip(counts.values(), times, strict=True))
        for times in zip(*parts, strict=True)
    ]
    return Additivity(
        f"{problem}: {split}",
        median_ns(whole),
        ratio_interval(sums, whole),
        ratio_interval(again, whole),
    )


def as_text(ratio: tuple[float, float, float]) -> str:
    """A median and its interval."""
    middle, low, high = ratio
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    plan = Plan.load(arguments.plan)
    if not plan.kernels:
        parser.error(f"{arguments.plan} has no kernels")
    backend = open_backend(plan.backend)
    found = []
    print("| kernel: split | whole call | predicted over measured (95 %) | same twice (95 %) |")
    print("|---|---|---|---|")
    with torch.no_grad():
        for kernel in plan.kernels:
            one = additivity(backend, kernel, arguments.rounds)
            found.append(one)
            said = f"{as_text(one.predicted)} | {as_text(one.same)}"
            print(f"| {one.kernel} | {format_ns(one.time_ns)} | {said} |", flush=True)
    near = sum(one.is_near for one in found)
    print(
        f"\npredicted over measured: median {median(one.predicted[0] for one in found):.3f}, "
        f"within {NEAR[0]} to {NEAR[1]} for {near} of {len(found)} kernels"
    )


if __name__ == "__main__":
    main()
