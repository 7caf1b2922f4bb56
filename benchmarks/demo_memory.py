"""Demonstration B: a 3-D U-Net in the memory of a small card, and a batch size that torch dislikes.

    python benchmarks/demo_memory.py --out benchmarks/results/h200 --minutes 9
    python benchmarks/demo_memory.py --device cpu --tiny --out out

First claim: at some batch eager runs out of 24 GiB, and a cap on cuDNN's workspace
(CUDNN_CONV_WSCAP_DBG) halves its speed, while ucudnn stays within 5 % of the fastest there is
without any limit. The table has a row per batch, so it also says the largest batch that fits.
Second claim: what pytorch#128936 reports (bfloat16, N=64: 1.193 s, N=63: 0.019 s) still happens,
and ucudnn does not have it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from step_workers import OUT_OF_MEMORY, Job, Run, Worker, measure, report, save, usual_options

from ucudnn.units import format_ns

ALLOWED_LOSS = 1.05
CAPPED_LOSS = 2.0
DEGRADED = 5.0
CAPPED = ("eager", "benchmark", "channels_last", "wscap@64", "ucudnn@64MiB")
UNLIMITED = ("eager", "benchmark", "ucudnn@none")
Row = Mapping[str, int | str]  # by label: ns per step, or why there is none


def label(job: Job) -> str:
    """The variant and the memory it has."""
    return f"{job.variant} in {job.memory_gib or 0:g} GiB" if job.memory_gib else job.variant


def sweep(
    jobs: Sequence[Job],
    batches: Sequence[int],
    deadline: float,
    on_row: Callable[[dict[int, dict[str, int | str]], list[Run]], None],
) -> list[Run]:
    """Chunk times of jobs, planned for the largest batch, at every batch; three blocks each.

    Args:
        jobs: of one network; their own batch is the largest.
        batches: rising.
        deadline: of `time.monotonic`.
        on_row: called with rows by batch and the set-ups after every answer, to save them.
    """
    rows: dict[int, dict[str, int | str]] = {batch: {} for batch in batches}
    runs = [Run(job) for job in jobs]
    for run in runs:  # one process at a time: each has the whole device
        worker = Worker(run.job)
        try:
            run.setup = worker.set_up(deadline, warm_batch=batches[0])
            run.failed = run.setup.get("failed")
            for batch in batches:
                # what did not fit at a smaller batch does not fit at this one
                entry = run.failed or step_time(worker, batch, deadline)
                rows[batch][label(run.job)] = entry
                if isinstance(entry, str):
                    run.failed = entry
                on_row(rows, runs)
        finally:
            worker.close()
    return runs


def step_time(worker: Worker, batch: int, deadline: float) -> int | str:
    """The middle one of three times of a step in ns, or why there is none."""
    taken = []
    for _ in range(3):
        reply = worker.ask("steps", deadline - time.monotonic(), batch=batch, count=2)
        if "failed" in reply:
            return str(reply["failed"])
        taken.append(reply["step_ns"])
    return sorted(taken)[1]


def judge_memory(rows: Mapping[int, Row], capped_gib: float) -> str:
    """At which batches the first claim holds, with what decides at the largest of them."""
    here = f" in {capped_gib:g} GiB"
    verdicts = []
    for batch, row in rows.items():
        own, eager = row.get(f"ucudnn@64MiB{here}"), row.get(f"eager{here}")
        unlimited = [time for name in UNLIMITED if isinstance(time := row.get(name), int)]
        if not isinstance(own, int) or not unlimited:
            continue
        best = min(unlimited)
        cap = row.get(f"wscap@64{here}")
        eager_fails = eager == OUT_OF_MEMORY
        cap_halves = cap == OUT_OF_MEMORY or (isinstance(cap, int) and cap >= CAPPED_LOSS * best)
        holds = eager_fails and cap_halves and own <= ALLOWED_LOSS * best
        verdicts.append(
            f"N={batch}: {'HOLDS' if holds else 'does not hold'}: eager: {_words(eager, best)}; "
            f"capped workspace: {_words(cap, best)}; ucudnn: {_words(own, best)}"
        )
    return "\n".join(verdicts) or "not decided: ucudnn took no step within the limit"


def _words(entry: int | str | None, best_ns: int) -> str:
    if isinstance(entry, int):
        return f"{entry / best_ns:.2f}x the fastest without a limit"
    return entry or "not reached"


def judge_degradation(runs: Iterable[Run]) -> str:
    """Whether torch still degrades at N=64, and whether ucudnn does."""
    times = {(run.job.variant, run.job.batch): min(run.samples_ns, default=0) for run in runs}
    large, small = max(n for _, n in times), min(n for _, n in times)
    if not all(times.get(("eager", batch)) for batch in (large, small)):
        return "not decided: eager took no step"
    eager = times["eager", large] / times["eager", small]
    lines = [f"eager at N={large} takes {eager:.1f} times as long as at N={small}"]
    lines.append("reproduces" if eager > DEGRADED else "no longer reproduces here")
    for variant in sorted({name for name, _ in times} - {"eager"}):
        own = times.get((variant, large))
        if own:
            lines.append(f"{variant}: {own / times['eager', small]:.1f} times eager's N={small}")
    return "; ".join(lines)


def table(rows: Mapping[int, Row]) -> str:
    """A Markdown table with a row per batch."""
    labels = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"| N | {' | '.join(labels)} |", "|---" * (len(labels) + 1) + "|"]
    for batch, row in rows.items():
        cells = [
            format_ns(entry) if isinstance(entry, int) else str(entry)
            for entry in (row.get(name, "") for name in labels)
        ]
        lines.append(f"| {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = usual_options(__doc__, "the two JSON files")
    parser.add_argument("--network", default="unet3d")
    parser.add_argument("--dtype", default="tf32")
    parser.add_argument("--batches", default="1,2,3,4,5,6", help="rising")
    parser.add_argument("--memory-gib", type=float, default=24)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    degradation(options, min(deadline, time.monotonic() + 20 * options.minutes))
    batches = [int(batch) for batch in options.batches.split(",")]
    limits = dict.fromkeys(CAPPED, options.memory_gib)
    jobs = [
        Job(
            *(options.network, variant, options.dtype, batches[-1], options.device, options.tiny),
            memory_gib=limit,
            config=options.config,
        )
        for variant, limit in [*limits.items(), *((variant, None) for variant in UNLIMITED)]
    ]
    found: dict[int, dict[str, int | str]] = {}

    def on_row(rows: dict[int, dict[str, int | str]], runs: list[Run]) -> None:
        found.update(rows)
        save(options.out / "demo_memory.json", runs, rows=rows, memory_gib=options.memory_gib)

    runs = sweep(jobs, batches, deadline, on_row)
    title = f"### {options.network}, {options.dtype}: a step by batch, or why there is none\n"
    says = [title, table(found), "", judge_memory(found, options.memory_gib)]
    more = {"rows": found, "memory_gib": options.memory_gib}
    save(options.out / "demo_memory.json", runs, says=says, **more)
    print("\n".join(says))


def degradation(options: argparse.Namespace, deadline: float) -> None:
    """The one convolution of pytorch#128936, forward only."""
    runs: list[Run] = []
    for batch in (63, 64):
        jobs = [
            Job(
                *("degradation", variant, "bf16", batch, options.device, options.tiny),
                train=False,
                config=options.config,
            )
            for variant in ("eager", "benchmark", "ucudnn@none")
        ]

        def on_update(new: list[Run], old: tuple[Run, ...] = (*runs,)) -> None:
            save(options.out / "demo_degradation.json", [*old, *new])

        runs += measure(jobs, 5, deadline, on_update)
    says = [f"pytorch#128936: {judge_degradation(runs)}"]
    save(options.out / "demo_degradation.json", runs, says=says)
    print("\n".join([*report(runs), *says]), flush=True)


if __name__ == "__main__":
    main()
