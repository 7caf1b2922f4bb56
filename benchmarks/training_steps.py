"""End-to-end training steps: ucudnn beside eager, channels_last, cudnn.benchmark, torch.compile.

    python benchmarks/training_steps.py --out benchmarks/results/h200 --minutes 9
    python benchmarks/training_steps.py --device cpu --tiny --out out   # a smoke test

Cases come in the order of --networks and --dtypes. A case that the results already have is skipped,
so a second run goes on where the first stopped; every answer is written at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

from step_workers import DTYPES, Job, Run, load, measure, report, save, usual_options

NETWORKS = {"resnet50": 256, "alexnet": 256, "unet3d": 2, "convnext": 128, "sd15": 8}
VARIANTS = (
    *("eager", "benchmark", "benchmark@all", "channels_last", "channels_last+benchmark", "compile"),
    *("ucudnn@64MiB", "ucudnn@none", "channels_last+ucudnn@64MiB"),
)
CPU_VARIANTS = ("eager", "channels_last", "compile", "ucudnn@8MiB", "ucudnn@none")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usual_options(__doc__, "training_steps.json")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--dtypes", default="tf32,bf16,fp16", help=f"some of {','.join(DTYPES)}")
    parser.add_argument("--variants", help=f"default: {','.join(VARIANTS)}")
    parser.add_argument("--batch", type=int, help="default: what is usual for each network")
    parser.add_argument("--tiny", action="store_true", help="small networks at batch 4")
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args(argv)


def cases(options: argparse.Namespace) -> Iterator[list[Job]]:
    """The jobs of each case, in order."""
    usual = CPU_VARIANTS if options.device == "cpu" else VARIANTS
    variants = options.variants.split(",") if options.variants else usual
    for dtype in options.dtypes.split(","):
        for network in options.networks.split(","):
            batch = options.batch or (4 if options.tiny else NETWORKS[network])
            yield [
                Job(
                    *(network, variant, dtype, batch, options.device, options.tiny),
                    config=options.config,
                )
                for variant in variants
            ]


def able(runs: Sequence[Run]) -> list[Run]:
    """The runs that took steps."""
    return [run for run in runs if run.samples_ns or run.early_ns]


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    deadline = time.monotonic() + 60 * options.minutes
    path = options.out / "training_steps.json"
    done = load(path)
    for jobs in cases(options):
        known = [run for run in done if run.job in jobs]
        if len(known) == len(jobs) and all(run.is_complete for run in known):
            continue
        if time.monotonic() > deadline:
            break
        # a case that was only begun is begun anew, and replaced when there is no less of it
        others = [run for run in done if run.job.case != jobs[0].case]
        before = [run for run in done if run.job.case == jobs[0].case]

        def better(
            runs: list[Run], others: list[Run] = others, before: list[Run] = before
        ) -> list[Run]:
            return [*others, *max(before, runs, key=lambda some: (len(able(some)), some is runs))]

        runs = measure(
            jobs, options.rounds, deadline, lambda found, better=better: save(path, better(found))
        )
        done = better(runs)
        print("\n".join(report(runs)), flush=True)


if __name__ == "__main__":
    main()
