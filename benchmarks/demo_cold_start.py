"""Demonstration C: cold starts from a plan. Nothing is tuned, and all processes agree bit by bit.

    python benchmarks/demo_cold_start.py --out benchmarks/results/h200 --minutes 9
    python benchmarks/demo_cold_start.py --device cpu --tiny --ranks 2 --out out

One process tunes and writes a plan. Twice, as many processes as --ranks start at once with an empty
measurement cache, follow the plan, and take some steps on the same data. The claims: none measures
anything; the weights of all of them, of both starts, are bitwise equal; a step takes at most 1.02
times that of the fastest of several processes with cudnn.benchmark, whose own weights are compared
too. A plan may not measure: it is made with unplanned="error".
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from step_workers import (
    Job,
    Reply,
    Run,
    Worker,
    compare,
    fastest,
    measure,
    report,
    save,
    usual_options,
    verdict,
)

ALLOWED_LOSS = 1.02
STEPS = 5
RIVALS = 3


def cold_start(jobs: Sequence[Job], deadline: float) -> list[Reply]:
    """Start processes at once; each takes some steps and returns the hash of its weights."""
    with tempfile.TemporaryDirectory() as cache:
        before = os.environ.get("UCUDNN_CACHE")
        os.environ["UCUDNN_CACHE"] = cache
        try:
            workers = [Worker(job) for job in jobs]
            with ThreadPoolExecutor(len(jobs)) as pool:
                replies = list(pool.map(lambda worker: _take_steps(worker, deadline), workers))
        finally:
            os.environ.pop("UCUDNN_CACHE")
            if before is not None:
                os.environ["UCUDNN_CACHE"] = before
        written = sum(path.is_file() for path in Path(cache).rglob("*"))
        return [{**reply, "cache_files": written} for reply in replies]


def _take_steps(worker: Worker, deadline: float) -> Reply:
    try:
        reply = worker.set_up(deadline)
        if "failed" in reply:
            return reply
        digest = worker.ask("digest", deadline - time.monotonic(), count=STEPS)
        return {"measured": reply.get("plan", {}).get("measured"), **digest}
    finally:
        worker.close()


def judge(starts: Iterable[Sequence[Reply]], runs: Sequence[Run]) -> list[str]:
    """One line per claim."""
    replies = [reply for start in starts for reply in start]
    failed = [reply["failed"] for reply in replies if "failed" in reply]
    measured = sum(reply.get("measured") or 0 for reply in replies)
    files = max((reply["cache_files"] for reply in replies), default=0)
    hashes = {reply.get("sha256") for reply in replies}
    lines = [
        (
            f"{'HOLDS' if measured == files == 0 and not failed else 'DOES NOT HOLD'}: "
            f"{measured} candidates measured and {files} files of measurements by "
            f"{len(replies)} processes"
        ),
        (
            f"{'HOLDS' if len(hashes) == 1 and not failed else 'DOES NOT HOLD'}: {len(hashes)} "
            f"different weights among {len(replies)} processes"
        ),
        *(f"failed: {reason}" for reason in dict.fromkeys(failed)),
    ]
    own, rival = fastest(runs, ours=True), fastest(runs, ours=False)
    if own is None or rival is None:
        return [*lines, "not decided: a side took no step"]
    ratio, low, high = compare(own, rival)
    says = verdict(high <= ALLOWED_LOSS, low > ALLOWED_LOSS)
    return [
        *lines,
        (
            f"{says}: a step takes {ratio:.3f} times that of the fastest {rival.job.variant} "
            f"(95 % interval {low:.3f} to {high:.3f}; claimed {ALLOWED_LOSS})"
        ),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = usual_options(__doc__, "demo_cold_start.json")
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--dtype", default="tf32")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--limit", default="64MiB", help="workspace limit, or none")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    plain = Job(options.network, "eager", options.dtype, options.batch, options.device)
    plain = replace(plain, small=options.tiny)
    ours = replace(
        plain,
        variant=f"ucudnn@{options.limit}",
        deterministic=True,
        config={"unplanned": "error", **options.config},
    )
    benchmark = replace(plain, variant="benchmark")
    options.out.mkdir(parents=True, exist_ok=True)
    plan = options.out / "cold_start.plan.json"
    tuned = Worker(ours)
    try:
        reply = tuned.set_up(deadline)
        if "failed" not in reply:
            reply = tuned.ask("save_plan", 60, path=str(plan))
    finally:
        tuned.close()
    if "failed" in reply:
        raise SystemExit(f"tuning failed: {reply['failed']}")
    ours = replace(ours, plan=str(plan))

    starts = [cold_start([ours] * options.ranks, deadline) for _ in range(2)]
    rival_start = cold_start([benchmark] * options.ranks, deadline)
    path = options.out / "demo_cold_start.json"

    def on_update(runs: list[Run]) -> None:
        save(path, runs, starts=starts, benchmark_start=rival_start)

    runs = measure([ours, *[benchmark] * RIVALS], options.rounds, deadline, on_update)
    distinct = len({reply.get("sha256") for reply in rival_start})
    says = [
        *judge(starts, runs),
        f"for comparison: {distinct} different weights among {options.ranks} x cudnn.benchmark",
    ]
    save(path, runs, starts=starts, benchmark_start=rival_start, says=says)
    print("\n".join([*report(runs), *says]))


if __name__ == "__main__":
    main()
