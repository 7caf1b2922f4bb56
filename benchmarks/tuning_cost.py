"""What lazy measuring saves and what it costs: measurements, seconds, regret.

    python benchmarks/tuning_cost.py record    # exhaustive timings, kept in benchmarks/results
    python benchmarks/tuning_cost.py replay    # lazy on every kept table (seconds)
    python benchmarks/tuning_cost.py measure   # both here and now, raced with fresh samples
    python benchmarks/tuning_cost.py again     # a second tune of ResNet-50, all cached
    python benchmarks/tuning_cost.py disturbed # a busy process beside it, from the middle on

Exhaustive means every algorithm at every size from 1 to N in every role that a chunk may have.
Replaying answers what the tuner asks from the table, in the order in which samples were taken. The
lazy and the exhaustive choice are made by the first samples and compared by the last three, which
neither saw: the luckiest of many candidates looks faster than it is.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from math import inf
from pathlib import Path
from statistics import median

import torch

from ucudnn.axis import BatchAxis
from ucudnn.backends import AbstractBackend, Elapsed, open_backend
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.benchmark.bench import AbstractBench, Arm, How, LocalBench, Look
from ucudnn.benchmark.protocol import FINALS, AbstractLoop, Protocol, Ring, Sampler, WholeLoop
from ucudnn.benchmark.rounds import Entrant, Result, run_rounds
from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.cache import MemoryCache
from ucudnn.config import Config
from ucudnn.execution.execute import bind
from ucudnn.kernels.candidates import Kernel
from ucudnn.kernels.choose import race_calls
from ucudnn.kernels.deadline import EFFORTS
from ucudnn.kernels.device import Session
from ucudnn.kernels.measure import KernelTuning
from ucudnn.kernels.results import Progress
from ucudnn.kernels.splits import BatchSplits
from ucudnn.kernels.tune import tune_problems
from ucudnn.layer_table import read_rows
from ucudnn.measurement import (
    Candidate,
    Conditions,
    Device,
    Measurement,
    MeasurementKey,
    Role,
    Software,
    Subject,
)
from ucudnn.plan import DEFAULT_ALGORITHM, Split
from ucudnn.problem import Problem
from ucudnn.units import format_bytes, format_ns

N = 16
_SAME = ((1, 1), (1, 1))
KERNELS = (
    Problem("fprop", N, 256, 256, (14, 14), (3, 3), padding=_SAME),
    Problem("dgrad", N, 512, 512, (7, 7), (3, 3), padding=_SAME),
    Problem("wgrad", N, 64, 128, (56, 56), (3, 3), stride=(2, 2), padding=_SAME),
    Problem("dgrad", N, 64, 128, (56, 56), (1, 1), stride=(2, 2)),
)
# Every candidate in every round, however slow: the table is to have what lazy measuring leaves out.
EXHAUSTIVE = Protocol(least_rounds=8, most_rounds=8, lapped=(), repeats=5)
SAME_TWICE = Protocol(least_rounds=60, most_rounds=60, lapped=(), repeats=60)
SAME = ("same", "same again")
# A sample of later chunks has at least so many runs, see `ChunkLoop.least_times`.
LATER_RUNS = 4
# The last samples of each candidate judge choices that were made by the others.
FRESH = 3


class Table:
    """A recorded table, as a backend that lists what is in it."""

    effort = EFFORTS["thorough"]

    def __init__(self, path: Path) -> None:
        cache = MemoryCache()
        cache.import_(path)
        self.path = path
        self.entries = list(cache)
        self.backend = _Replayed(self.entries)

    @property
    def kernels(self) -> list[Problem]:
        """One per geometry, at its largest batch."""
        largest: dict[Problem, Problem] = {}
        for entry in self.entries:
            problem = entry.key.problem
            known = largest.setdefault(problem.with_batch(1), problem)
            if problem.batch > known.batch:
                largest[problem.with_batch(1)] = problem
        return list(largest.values())

    def known(self, problem: Problem) -> dict[Arm, Measurement]:
        """Everything recorded of a kernel."""
        return {
            Arm(entry.key.problem.batch, entry.key.algorithm, entry.key.conditions.role): entry
            for entry in self.backend.measurements
            if entry.key.subject == Subject.CHUNK
            and entry.key.problem.with_batch(problem.batch) == problem
        }


class _Replayed(RecordedBackend):
    def available_bytes(self) -> int:
        return 1 << 62

    def elapsed_apart(self, run: Callable[[], object], lead_ns: int) -> Elapsed:
        """The time that a run itself tells, and none of a host."""
        del lead_ns
        time_ns = run()
        assert isinstance(time_ns, int)
        return Elapsed(time_ns, 0)


class GpuTable(Table):
    """The times of a GPU's kernels in float32, as gpu_suite.py wrote them, with stated workspace.

    Each configuration was timed in one role, which stands for all.
    """

    effort = EFFORTS["normal"]

    def __init__(self, path: Path) -> None:
        answers = json.loads(path.with_name("answers.json").read_text())
        device, software = Device("cuda", answers["gpu"]), Software(answers["torch"])
        self.path = path
        self.entries = []
        for row in csv.DictReader(path.read_text().splitlines()):
            table, _, name = row["name"].partition(":")
            layer = _layers(table)[name, row["op"]]
            problem = replace(layer.with_batch(int(row["batch"])), math="tf32")
            time_ns = round(float(row["median_us"]) * 1000)
            for role in (Role.ALONE, Role.LATER):
                key = MeasurementKey(
                    problem, row["algorithm"], device, software, Conditions(role=role), 1
                )
                self.entries.append(
                    Measurement(
                        key,
                        "ok",
                        time_ns,
                        samples=(time_ns,) * (2 * FRESH),
                        workspace_bytes=int(row["workspace_bytes"]),
                    )
                )
        self.backend = _Stating(self.entries)

    def known(self, problem: Problem) -> dict[Arm, Measurement]:
        """Everything recorded of a kernel."""
        return {
            Arm(entry.key.problem.batch, entry.key.algorithm, entry.key.conditions.role): entry
            for entry in self.entries
            if entry.key.problem.with_batch(problem.batch) == problem
        }


@lru_cache
def _layers(table: str) -> dict[tuple[str, str], Problem]:
    rows = read_rows(Path(__file__).parent / "layers" / f"{table}.csv")
    return {(row.name, row.problem.op): row.problem for row in rows}


class _Stating(_Replayed):
    """States workspace, as cuDNN does."""

    def candidates(self, problem: Problem, adds_bias: bool = False) -> tuple[Candidate, ...]:
        known = self._entries.get(problem, {})
        return tuple(
            replace(one, workspace_bytes=known[one.algorithm][Role.ALONE].workspace_bytes)
            for one in super().candidates(problem, adds_bias)
        )


@dataclass
class Runs:
    """Runs that were timed: how many, and how long they took together."""

    count: int = 0
    time_ns: int = 0

    def __str__(self) -> str:
        return f"{self.count} | {format_ns(self.time_ns)}"


def total(several: Iterable[Runs]) -> Runs:
    """All runs together."""
    found = Runs()
    for one in several:
        found.count += one.count
        found.time_ns += one.time_ns
    return found


class _Timed(AbstractLoop):
    """Runs of a candidate that take the recorded time and are counted."""

    def __init__(self, time_ns: int, least_times: int) -> None:
        self._time_ns = time_ns
        self._least_times = least_times
        self.runs = Runs()  # where the next ones are counted

    @property
    def least_times(self) -> int:
        """As many runs as a sample of a `ChunkLoop` has at least."""
        return self._least_times

    def prepare(self, times: int) -> Callable[[], int]:
        """Runs that tell how long they take."""

        def run() -> int:
            self.runs.count += times
            self.runs.time_ns += times * self._time_ns
            return times * self._time_ns

        return run


class ReplayBench(AbstractBench):
    """Answers from a table, and counts the runs that a `LocalBench` would time."""

    def __init__(
        self,
        backend: AbstractBackend,
        problem: Problem,
        known: Mapping[Arm, Measurement],
        protocol: Protocol,
    ) -> None:
        self._backend = backend
        self._problem = problem
        self._known = known
        self._protocol = protocol
        self.asked: set[Arm] = set()
        self.raced: set[Arm] = set()
        self.looks, self.races = Runs(), Runs()
        self._samplers: dict[Arm, tuple[_Timed, Sampler]] = {}

    def look(self, arm: Arm, limit: int | None, rival_ns: float = inf) -> Look:
        """The first sample."""
        self.asked.add(arm)
        entry = self._known[arm]
        if entry.status == "failed":
            raise RuntimeError(entry.reason)
        workspace = entry.workspace_bytes or 0
        if limit is not None and workspace > limit:
            return Look(workspace, 0.0, None)
        self._sampler(arm, self.looks).shortest_ns(rival_ns=rival_ns)
        return Look(workspace, 0.0, _samples(entry)[0])

    def rounds(
        self, arms: Sequence[Arm], known: Mapping[tuple[int, str], tuple[int, int]]
    ) -> list[Result]:
        """The samples in their order, for as long as the protocol asks."""
        self.asked.update(arms)
        self.raced.update(arms)
        entrants = [Entrant(self._sample_of(arm), arm[::2]) for arm in arms]
        return run_rounds(self._backend, entrants, self._protocol, known)

    def _sample_of(self, arm: Arm) -> Callable[[], int]:
        """The recorded samples, each of which counts as runs that take the median."""
        sampler, samples = self._sampler(arm, self.races), _repeated(_samples(self._known[arm]))
        sampler.warm_up(self._protocol)

        def sample_ns() -> int:
            sampler.sample_ns()
            return next(samples)

        return sample_ns

    def _sampler(self, arm: Arm, runs: Runs) -> Sampler:
        if arm not in self._samplers:
            calls = self._problem.batch // arm.size
            least_times = min(calls, LATER_RUNS) if arm.role == Role.LATER else 1
            loop = _Timed(self._known[arm].time_ns or 0, least_times)
            self._samplers[arm] = loop, Sampler(loop, self._backend)
        loop, sampler = self._samplers[arm]
        loop.runs = runs
        return sampler

    def whole(self, splits: Sequence[Split], has_bias: bool = False) -> list[Result]:
        """A table holds no whole plans."""
        raise NotImplementedError


def _samples(entry: Measurement) -> tuple[int, ...]:
    return entry.samples or (entry.time_ns or 0,)


def _repeated(samples: Sequence[int]) -> Iterator[int]:
    while True:
        yield from samples


class ReplaySession(Session):
    """A session whose benches answer from tables."""

    bench_of: ReplayBench

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cache, self.can_measure = MemoryCache(), True

    def bench(self, axis: object) -> AbstractBench:
        """The one bench."""
        del axis
        return self.bench_of


@dataclass(frozen=True)
class Replay:
    """What lazy measuring did to one kernel of a table.

    Args:
        problem: the kernel.
        measured: candidates that were run.
        raced: those of them that took part in a race.
        looks: the timed runs of first looks.
        races: the timed runs of races, with those to warm up.
        candidates: that could have been.
        regret: of the chosen split against the exhaustive choice, by samples that neither saw.
        gap: that the certificate leaves.
        split: that was chosen.
    """

    problem: Problem
    measured: int
    raced: int
    looks: Runs
    races: Runs
    candidates: int
    regret: float
    gap: float
    split: Split


def replay(table: Table, problem: Problem, limit: int | None = None) -> Replay:
    """Tune one kernel of a table lazily."""
    recorded = table.known(problem)
    known = {arm: _part(entry, slice(None, -FRESH)) for arm, entry in recorded.items()}
    fresh = [_part(entry, slice(-FRESH, None)) for entry in recorded.values()]
    session = ReplaySession(table.backend, MemoryCache(), effort=table.effort)
    session.bench_of = bench = ReplayBench(table.backend, problem, known, session.how.chunks)
    is_sparse = len({arm.size for arm in known}) < problem.batch
    config = Config(policy="powers-of-two" if is_sparse else "all")
    tuning = KernelTuning(session, config, Kernel(problem), limit is not None)
    tables = tuning.measure_within(limit)
    fitting = [
        entry
        for entry in known.values()
        if entry.status == "ok" and (limit is None or (entry.workspace_bytes or 0) <= limit)
    ]
    chosen = best_split(problem, tables[0].measurements, session, limit)
    best = best_split(problem, fitting, session, limit)
    regret = cost_ns(chosen, fresh) / cost_ns(best, fresh) - 1
    return Replay(
        problem,
        measured=len(bench.asked),
        raced=len(bench.raced),
        looks=bench.looks,
        races=bench.races,
        candidates=len(fitting),
        regret=regret,
        gap=tuning.requests(limit)[0].outlook().gap,
        split=chosen,
    )


def _part(entry: Measurement, samples: slice) -> Measurement:
    """What an entry would be with some of its samples; all where it has too few to divide."""
    if len(entry.samples) <= FRESH or entry.status != "ok":
        return entry
    kept = entry.samples[samples]
    return replace(entry, samples=kept, time_ns=median_ns(kept), spread_ns=spread_ns(kept))


def best_split(
    problem: Problem, entries: Sequence[Measurement], session: Session, limit: int | None
) -> Split:
    """The fastest split by what was timed."""
    splits = BatchSplits(BatchAxis(problem), (), entries, session.implementation_of, limit).splits()
    if session.implementation_of(problem, DEFAULT_ALGORITHM) is not None:
        splits.insert(0, Split.default(problem.batch))
    return min(splits, key=lambda split: cost_ns(split, entries))


def cost_ns(split: Split, entries: Iterable[Measurement]) -> float:
    """The sum of the chunks' medians in their roles; infinite where one was not timed."""
    times = {
        (entry.key.problem.batch, entry.key.algorithm, entry.key.conditions.role): entry.time_ns
        for entry in entries
    }
    total = 0.0
    for place, chunk in enumerate(split.chunks):
        roles = (Role.LATER,) if place else (Role.FIRST, Role.ALONE, Role.LATER)
        if len(split.chunks) == 1:
            roles = (Role.ALONE,)
        elif not place and not any((chunk.size, chunk.algorithm, r) in times for r in roles[:2]):
            roles = (Role.LATER,)
        found = [times.get((chunk.size, chunk.algorithm, role)) for role in roles]
        total += next((time_ns for time_ns in found if time_ns), float("inf"))
    return total


def exhaustive(session: Session, problem: Problem) -> list[Measurement]:
    """Time every candidate of a kernel in the same rounds."""
    backend, axis = session.backend, BatchAxis(problem)
    bench = LocalBench(backend, axis, how=How(chunks=EXHAUSTIVE))
    roles = (Role.LATER,) if problem.op != "wgrad" else (Role.ALONE, Role.LATER)
    looks: dict[Arm, Measurement] = {}
    for size in range(1, problem.batch + 1):
        for candidate in backend.candidates(problem.with_batch(size)):
            for role in roles if size < problem.batch else (Role.ALONE,):
                arm = Arm(size, candidate.algorithm, role)
                look = bench.look(arm, None)
                key = session.key(candidate.problem, arm.algorithm, role)
                looks[arm] = Measurement(
                    key,
                    "screened",
                    look.time_ns,
                    workspace_bytes=look.workspace_bytes,
                    error=look.error,
                    notes=candidate.notes,
                    implementation=candidate.implementation,
                    is_deterministic=candidate.is_deterministic,
                )
    results = bench.rounds(list(looks), {})
    return [
        replace(
            looks[arm],
            status="ok",
            time_ns=median_ns(result.samples),
            spread_ns=spread_ns(result.samples),
            samples=tuple(result.samples),
        )
        for arm, result in zip(looks, results, strict=True)
    ]


def same_twice(session: Session, problem: Problem) -> list[Measurement]:
    """Time torch's own convolution under two names, as finalists are."""
    backend = session.backend
    ring = Ring.allocate(backend, problem)
    call = bind(backend, problem, Split.default(problem.batch))
    samplers = [Sampler(WholeLoop(ring, call), backend) for _ in SAME]
    for sampler in samplers:
        sampler.warm_up(FINALS)
    results = run_rounds(backend, [Entrant(one.sample_ns) for one in samplers], SAME_TWICE)
    return [
        Measurement(
            session.key(problem, name),
            "ok",
            median_ns(result.samples),
            spread_ns(result.samples),
            tuple(result.samples),
            0,
        )
        for name, result in zip(SAME, results, strict=True)
    ]


def a_a_interval(entries: Iterable[Measurement]) -> float:
    """How far from 1 the 95 % interval of the ratio of equal things reaches, typically."""
    by_name = {entry.key.algorithm: entry.samples for entry in entries}
    pairs = list(zip(*(by_name[name] for name in SAME), strict=True))
    count = FINALS.most_rounds
    reaches = []
    for start in range(0, len(pairs) - count + 1, count):
        first, second = zip(*pairs[start : start + count], strict=True)
        _, low, high = ratio_interval(first, second)
        reaches.append(max(1 - low, high - 1))
    return median(reaches)


def record(folder: Path) -> None:
    session = Session(open_backend("torch_cpu"), MemoryCache())
    device = session.backend.device()
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    began, load = time.monotonic(), os.getloadavg()
    tables: dict[str, list[Measurement]] = {"exhaustive": [], "same_twice": []}
    tables["same_twice"] += same_twice(session, KERNELS[0])
    for problem in KERNELS:
        start = time.monotonic()
        tables["exhaustive"] += exhaustive(session, problem)
        print(f"{problem}: {time.monotonic() - start:.0f} s", flush=True)
        for table, entries in tables.items():
            cache = MemoryCache()
            cache.put(entries)
            cache.export(target / f"{table}.csv")
    after = os.getloadavg()
    (target / "tuning_cost.md").write_text(
        f"# What tuning may cost, on {device}\n\n"
        f"Made by `python benchmarks/tuning_cost.py record benchmarks/results` on "
        f"{datetime.now(UTC):%Y-%m-%d} in {time.monotonic() - began:.0f} s, "
        f"{session.backend.conditions().threads} threads, "
        f"torch {session.backend.software().torch}, load {load[0]:.1f} before and {after[0]:.1f} "
        f"after: a shared machine, so look at the spread of the samples.\n\n"
        f"* `exhaustive.csv`: four kernels of ResNet-18 at N={N}, float32, every algorithm at "
        f"every size in every role, {EXHAUSTIVE.least_rounds} samples in interleaved rounds\n"
        f"* `same_twice.csv`: torch's own convolution under two names, "
        f"{SAME_TWICE.least_rounds} samples each\n"
    )


def replay_on_gpus(folder: Path) -> None:
    print("| GPU | workspace limit | kernel | measured | of | regret | split |")
    print("|---|---|---|---|---|---|---|")
    totals = []
    for path in sorted(folder.rglob("timings.csv")):
        table = GpuTable(path)
        for limit in (8 << 20, 64 << 20, None):
            found = [replay(table, problem, limit) for problem in table.kernels]
            prefix = f"| {path.parent.name} | {'none' if limit is None else format_bytes(limit)} |"
            for one in found:
                count = f"{one.measured} | {one.candidates}"
                print(f"{prefix} {one.problem} | {count} | {one.regret:.2%} | {one.split} |")
            measured = sum(one.measured for one in found)
            print(f"{prefix} all | {measured} | {sum(one.candidates for one in found)} |||")
            looks, races = total(one.looks for one in found), total(one.races for one in found)
            raced, both = sum(one.raced for one in found), total([looks, races])
            totals.append(f"{prefix} {measured} | {looks} | {raced} | {races} | {both} |")
    print(
        "\n| GPU | workspace limit | looked at | timed runs | they take | raced | timed runs "
        "| they take | all timed runs | they take |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    print(*totals, sep="\n")


def replay_all(folder: Path) -> None:
    print("| table | kernel | measured | of | share | regret | gap left |")
    print("|---|---|---|---|---|---|---|")
    for path in sorted(folder.rglob("exhaustive.csv")):
        table = Table(path)
        found = [replay(table, problem) for problem in table.kernels]
        for one in found:
            print(
                f"| {path.parent.name} | {one.problem} | {one.measured} | {one.candidates} | "
                f"{one.measured / one.candidates:.1%} | {one.regret:.2%} | {one.gap:.2%} |"
            )
        measured, candidates = sum(one.measured for one in found), sum(o.candidates for o in found)
        share = measured / candidates
        print(f"| {path.parent.name} | all | {measured} | {candidates} | {share:.1%} |||")
        same = path.with_name("same_twice.csv")
        if same.exists():
            print(f"\nA/A: within {a_a_interval(Table(same).entries):.1%}\n")
    replay_on_gpus(folder)


def measure() -> None:
    """Lazy and exhaustive here and now; both plans raced with fresh samples."""
    backend = open_backend("torch_cpu")
    print("| kernel | lazy | s | exhaustive | s | lazy plan over exhaustive plan, fresh (95 %) |")
    print("|---|---|---|---|---|---|")
    for problem in KERNELS:
        session = Session(backend, MemoryCache())
        start = time.monotonic()
        tuning = KernelTuning(session, Config(policy="all"), Kernel(problem), is_limited=False)
        tables = tuning.measure_within(None)
        lazy_s, lazy_count = time.monotonic() - start, session.measured
        start = time.monotonic()
        everything = exhaustive(session, problem)
        all_s = time.monotonic() - start
        splits = [
            best_split(problem, tables[0].measurements, session, None),
            best_split(problem, everything, session, None),
        ]
        if splits[0] == splits[1]:
            said = f"the same plan: {splits[0]}"
        else:
            lazy, best = race_calls(tuning, splits)
            ratio, low, high = ratio_interval(lazy.samples, best.samples)
            said = f"{ratio:.3f} ({low:.3f} to {high:.3f}): {splits[0]} / {splits[1]}"
        took = f"{lazy_count} | {lazy_s:.1f} | {len(everything)} | {all_s:.1f}"
        print(f"| {problem} | {took} | {said} |")


def again() -> None:
    """Tune ResNet-50 twice at a small size: the second time everything is in the cache."""
    import ucudnn
    from ucudnn.cli.models import load_model

    model = load_model(str(Path(__file__).parents[1] / "examples" / "models.py:resnet50"))
    inputs = torch.empty(4, 3, 64, 64)
    config = Config(workspace_limit="4MiB", cache=tempfile.mkdtemp())
    for name in ("first", "second"):
        last: list[Progress] = []
        start = time.monotonic()
        plan = ucudnn.tune(model, inputs, config, last.append)
        seconds = time.monotonic() - start
        print(
            f"{name} tune of ResNet-50: {seconds:.2f} s, {last[-1].measured} measured, "
            f"{last[-1].reused} reused, {len(plan.kernels)} kernels, "
            f"{format_ns(plan.predicted_time_ns)} predicted"
        )
    ratios = [kernel.predicted_time_ns / kernel.timing.time_ns for kernel in plan.kernels]
    near = sum(0.95 <= ratio <= 1.05 for ratio in ratios)
    print(
        f"predicted over measured: median {median(ratios):.2f}, within 0.95 to 1.05 for {near} of "
        f"{len(ratios)} kernels"
    )


def disturbed() -> None:
    """Tune in peace, and with a hog that starts in the middle; race both plans in peace again."""
    backend = open_backend("torch_cpu")
    problems = [(f"layer {number}", problem) for number, problem in enumerate(KERNELS)]
    hogs: list[subprocess.Popen[bytes]] = []

    def disturb(progress: Progress) -> None:
        if not hogs and progress.done >= progress.total / 2:
            hogs.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))

    plans = []
    for name, on_progress in (("in peace", None), ("with a hog", disturb)):
        start = time.monotonic()
        config = Config(workspace_limit="12MiB", policy="all", cache=tempfile.mkdtemp())
        try:
            plans.append(tune_problems(problems, config, on_progress))
        finally:
            for hog in hogs:
                hog.kill()
        print(f"tuned {name} in {time.monotonic() - start:.1f} s", flush=True)
    assert hogs, "the hog never started"
    print("| kernel | in peace | with a hog | its plan over the other, raced in peace (95 %) |")
    print("|---|---|---|---|")
    sums = [0, 0]
    for problem in KERNELS:
        splits = [plan.split(problem) for plan in plans]
        wholes = LocalBench(backend, BatchAxis(problem)).whole(splits)
        samples = [whole.samples for whole in wholes]
        sums = [total + median_ns(taken) for total, taken in zip(sums, samples, strict=True)]
        ratio, low, high = ratio_interval(samples[1], samples[0])
        said = f"{ratio:.3f} ({low:.3f} to {high:.3f})" if splits[0] != splits[1] else "the same"
        print(f"| {problem} | {splits[0]} | {splits[1]} | {said} |", flush=True)
    print(f"all kernels: {format_ns(sums[0])} and {format_ns(sums[1])}, {sums[1] / sums[0]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_tables = {"record": record, "replay": replay_all}
    here = {"measure": measure, "again": again, "disturbed": disturbed}
    parser.add_argument("what", choices=[*on_tables, *here])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    with torch.no_grad():
        if arguments.what in on_tables:
            on_tables[arguments.what](arguments.folder)
        else:
            here[arguments.what]()


if __name__ == "__main__":
    main()
