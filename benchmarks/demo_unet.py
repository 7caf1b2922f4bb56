"""Demonstration A: training a 3-D U-Net whose layout is pinned, N=2, 128^3, InstanceNorm3d.

    python benchmarks/demo_unet.py --out benchmarks/results/h200 --minutes 9
    python benchmarks/demo_unet.py --device cpu --tiny --out out

The claim: a step at least 1.15 times as fast as the fastest of eager, cudnn.benchmark,
channels_last_3d and torch.compile, with no more memory reserved than the least of them. The last
lines say for each dtype whether it holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import groupby

from step_workers import (
    Job,
    Run,
    compare,
    fastest,
    load,
    measure,
    report,
    save,
    usual_options,
    verdict,
)

CLAIMED_GAIN = 1.15
RIVALS = ("eager", "benchmark", "channels_last", "channels_last+benchmark", "compile")
OURS = ("ucudnn@none", "ucudnn@64MiB", "channels_last+ucudnn@none")


def judge(runs: Iterable[Run]) -> str:
    """Whether the claim holds for one dtype, with the numbers that decide."""
    runs = list(runs)
    best, rival = fastest(runs, ours=True), fastest(runs, ours=False)
    if best is None or rival is None:
        missing = "ucudnn" if best is None else "the rivals"
        return f"not decided: {missing} took no step"
    ratio, low, high = compare(rival, best)
    reserved = [
        run.memory["reserved"]
        for run in runs
        if "ucudnn" not in run.job.parts and "reserved" in run.memory
    ]
    least, own = min(reserved, default=0), best.memory.get("reserved", 0)
    says = verdict(low >= CLAIMED_GAIN and own <= least, high < CLAIMED_GAIN or own > least)
    return (
        f"{says}: {best.job.variant} is {ratio:.2f} times as fast "
        f"as {rival.job.variant} (95 % interval {low:.2f} to {high:.2f}; claimed {CLAIMED_GAIN}) "
        f"and reserves {own / 2**30:.2f} GiB against {least / 2**30:.2f} GiB"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = usual_options(__doc__, "demo_unet.json")
    parser.add_argument("--dtypes", default="fp16,tf32,bf16")
    parser.add_argument("--variants", default=",".join((*RIVALS, *OURS)))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    path = options.out / "demo_unet.json"
    done = [run for run in load(path) if run.is_complete]
    for dtype in options.dtypes.split(","):
        jobs = [
            Job("unet3d", variant, dtype, 2, options.device, options.tiny, config=options.config)
            for variant in options.variants.split(",")
        ]
        if all(any(run.job == job for run in done) for job in jobs):
            continue
        # what is compared was timed in the same rounds
        done = [run for run in done if run.job.dtype != dtype]

        def on_update(runs: list[Run], done: list[Run] = done) -> None:
            save(path, [*done, *runs])

        if time.monotonic() < deadline:
            done += measure(jobs, options.rounds, deadline, on_update)
    by_dtype = groupby(done, lambda run: run.job.dtype)
    says = [f"{dtype}: {judge(members)}" for dtype, members in by_dtype]
    save(path, done, says=says)
    print("\n".join([*report(done), *says]))


if __name__ == "__main__":
    main()
