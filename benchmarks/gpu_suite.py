"""Everything that is to be known of a GPU, in one command: checks first, then measurements.

    python benchmarks/gpu_suite.py results/h200 benchmarks/layers/alexnet_ucudnn_csv.csv \
        benchmarks/layers/resnet50_n256.csv --dtypes fp32,fp16 --seconds 480

Parts, in this order; --parts names some of them:

    tests     pytest tests/gpu: every engine configuration against float64, beta 1, alignment,
              remainders, capture, threads, training
    timings   every engine configuration of the layers, undivided and in micro-batches, beside
              torch's default and cudnn.benchmark: timings.csv, splits.csv
    tune      plans of the layers at each limit, and the measurements as recorded.csv, which
              `ucudnn tune LAYERS --backend recorded --cache recorded.csv` replays without a GPU

Writes into the folder as it goes, so that what was measured stays when the time is over; starting
again goes on with what is not there yet. profile.json is the device as cuDNN describes it,
answers.json what else was asked, provenance.json who measured what, when and in which state.
`python benchmarks/gpu_tables.py FOLDER` prints what the timings say.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import Any, TextIO

import torch
from torch import Tensor

from ucudnn.backends.cudnn.api import Handle
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.backends.cudnn.engine import configurations
from ucudnn.backends.cudnn.graph import Target
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.candidate import Candidate
from ucudnn.config import Config
from ucudnn.errors import UcudnnError
from ucudnn.execute import Call, bind
from ucudnn.layer_table import read_layers
from ucudnn.plan import DEFAULT_ALGORITHM, Split, Step
from ucudnn.problem import OPS, Problem
from ucudnn.tuning.tuner import tune_problems

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
MOST_WORKSPACE = 8 << 30
CHECKED_BATCH = 4  # float64 on the GPU is slow: a few samples show what an engine computes
MOST_SECONDS = 60.0
TOO_SLOW = 8  # times the best so far: one sample is enough
TIMINGS = (
    *("name", "op", "dtype", "layout", "batch", "algorithm", "workspace_bytes", "mode", "rank"),
    *("notes", "median_us", "min_us", "samples", "error", "beta1_error"),
)
SPLITS = (
    *("name", "op", "dtype", "layout", "batch", "limit_mib", "undivided_algorithm"),
    *("undivided_us", "torch_default_us", "torch_benchmark_us", "torch_benchmark_extra_mib"),
    *("micro_batch", "algorithm", "workspace_mib", "predicted_us", "eager_us", "captured_us"),
    "host_us_per_chunk",
)


@dataclass(frozen=True)
class Task:
    """One kernel to time, under the names that the tables have for it."""

    name: str
    dtype: str
    problem: Problem

    @property
    def columns(self) -> tuple[str, str, str, str]:
        """The kernel's columns in a table."""
        return self.name, self.problem.op, self.dtype, self.problem.layout


@dataclass(frozen=True)
class Timed:
    """A configuration at one micro-batch size."""

    time_us: float
    candidate: Candidate


class Suite:
    """What all parts share.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = Path(options.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.backend = CudnnBackend()
        self.skipped: Counter[str] = Counter()
        self.answers: dict[str, Any] = {}
        self.deadline = time.monotonic() + options.seconds
        self.lists = [0, 0]
        self._faults_path = self.folder / "faults.json"
        self.faults: list[str] = []
        if self._faults_path.exists():
            self.faults = json.loads(self._faults_path.read_text())

    @contextmanager
    def guarded(self, problem: Problem, algorithm: str) -> Iterator[None]:
        """Start anew without a configuration that faults, or that does not end in a minute."""
        timer = Timer(MOST_SECONDS, self._start_anew, (problem, algorithm, "does not end"))
        timer.daemon = True
        timer.start()
        try:
            yield
        except (RuntimeError, UcudnnError) as error:
            if self.backend.is_broken():
                self._start_anew(problem, algorithm, str(error).splitlines()[0])
            raise
        finally:
            timer.cancel()

    def _start_anew(self, problem: Problem, algorithm: str, reason: str) -> None:
        """A GPU context in which a kernel has faulted is of no more use."""
        fault = f"{problem} {algorithm}"
        self.skipped[f"{fault}: {reason}"] += 1
        self.save_answers()
        self._faults_path.write_text(json.dumps([*self.faults, fault], indent=1))
        parts = ",".join(part for part in self.options.parts.split(",") if part != "tests")
        seconds = str(max(1.0, self.deadline - time.monotonic()))
        arguments = [*sys.argv[1:], "--parts", parts, "--seconds", seconds]
        os.execv(sys.executable, [sys.executable, __file__, *arguments])

    @property
    def is_over(self) -> bool:
        """Whether the time for measurements is over."""
        return time.monotonic() > self.deadline

    def tasks(self) -> Iterator[Task]:
        """Kernels, each once, in the order of the command line."""
        seen = set()
        for dtype in self.options.dtypes.split(","):
            for layout in self.options.layouts.split(","):
                for path in self.options.layers:
                    ops = self.options.ops.split(",")
                    for name, problem in read_layers(path, ops, DTYPES[dtype], layout):
                        math = "tf32" if dtype == "fp32" else "strict"
                        problem = replace(problem, math=math)  # noqa: PLW2901
                        if problem not in seen:
                            seen.add(problem)
                            yield Task(f"{Path(path).stem}:{name}", dtype, problem)

    def save_answers(self) -> None:
        """Write what is known so far."""
        answers = {
            "cudnn": self.backend.runtime.cudnn.version,
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(),
            "lists_by_handle_equal_by_profile": self.lists,
            "skipped": dict(self.skipped),
            **self.answers,
        }
        (self.folder / "answers.json").write_text(json.dumps(answers, indent=1) + "\n")


def main() -> None:
    options = parse()
    suite = Suite(options)
    profile = write_profile(suite)
    with provenance(suite):
        parts: dict[str, Callable[[], None]] = {
            "tests": lambda: run_tests(suite),
            "timings": lambda: time_layers(suite, profile),
            "tune": lambda: tune_layers(suite),
        }
        for name in options.parts.split(","):
            began = time.monotonic()
            parts[name]()
            suite.answers[f"{name}_seconds"] = round(time.monotonic() - began, 1)
            suite.save_answers()
    print(json.dumps({**suite.answers, "skipped": dict(suite.skipped.most_common(12))}, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("folder", help="results go here, such as benchmarks/results/h200")
    parser.add_argument("layers", nargs="+", help="tables of layers, most valuable first")
    parser.add_argument("--parts", default="tests,timings,tune")
    parser.add_argument("--dtypes", default="fp32,fp16")
    parser.add_argument("--layouts", default="nchw")
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--limits", default="8,64,512", help="MiB")
    parser.add_argument("--min-batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=480.0, help="for timings and tune")
    parser.add_argument("--benchmark", action="store_true", help="tune beside cudnn.benchmark")
    return parser.parse_args()


def write_profile(suite: Suite) -> DeviceProfile:
    cudnn = suite.backend.runtime.cudnn
    with Handle(cudnn) as handle:
        profile = DeviceProfile.of_handle(cudnn, handle)
    profile.save(suite.folder / "profile.json")
    return profile


@contextmanager
def provenance(suite: Suite) -> Iterator[None]:
    """Note who measured what and when, and the state of the GPU before and after."""
    record: dict[str, Any] = {
        "command": sys.argv[1:],
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": asdict(suite.backend.device()),
        "software": asdict(suite.backend.software()),
        "python": sys.version.split()[0],
        "before": suite.backend.state(),
    }
    path = suite.folder / "provenance.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    try:
        yield
    finally:
        record["after"] = suite.backend.state()
        record["ended"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        path.write_text(json.dumps([*runs, record], indent=1) + "\n")
        suite.save_answers()


def run_tests(suite: Suite) -> None:
    """The tests, in a process of their own: a kernel that faults ends them and not the rest."""
    report = suite.folder / "tests.xml"
    command = ["pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "tests/gpu"]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    (suite.folder / "tests.txt").write_text(done.stdout[-60_000:] + done.stderr[-4000:])
    suite.answers["tests"] = done.stdout.strip().splitlines()[-1] if done.stdout else done.stderr
    print(suite.answers["tests"], flush=True)


def time_layers(suite: Suite, profile: DeviceProfile) -> None:
    with (
        appended(suite.folder / "timings.csv", TIMINGS) as (timings, _),
        appended(suite.folder / "splits.csv", SPLITS) as (splits, done),
    ):
        for task in suite.tasks():
            if (*task.columns, str(task.problem.batch)) in done:
                continue
            if suite.is_over:
                suite.skipped["time"] += 1
                continue
            try:
                compare_lists(suite, task.problem, profile)
                time_kernel(suite, task, csv.writer(timings), csv.writer(splits))
            except (RuntimeError, UcudnnError) as error:
                reason = str(error).splitlines()[0][:160]
                suite.skipped[f"{' '.join(task.columns)}: {type(error).__name__} {reason}"] += 1
            torch.cuda.empty_cache()
            timings.flush()
            splits.flush()
            suite.save_answers()


@contextmanager
def appended(path: Path, columns: Sequence[str]) -> Iterator[tuple[TextIO, set[tuple[str, ...]]]]:
    """A table to add to, and the kernels (name, op, dtype, layout, batch) that it has."""
    done = set()
    if path.exists():
        with path.open(newline="") as stream:
            keys = ("name", "op", "dtype", "layout", "batch")
            done = {tuple(row[key] for key in keys) for row in csv.DictReader(stream)}
    is_new = not path.exists()
    with path.open("a", newline="") as stream:
        if is_new:
            csv.writer(stream).writerow(columns)
        yield stream, done


def compare_lists(suite: Suite, problem: Problem, profile: DeviceProfile) -> None:
    """Whether cuDNN proposes for the profile what it proposes for the device itself."""
    runtime = suite.backend.runtime
    here = runtime.configurations(torch.cuda.current_device(), problem)
    with profile.descriptor(runtime.cudnn) as device:
        elsewhere = configurations(Target(runtime.cudnn, device=device), problem)
    suite.lists[0] += here == elsewhere
    suite.lists[1] += 1


def time_kernel(suite: Suite, task: Task, timings: Any, splits: Any) -> None:
    """Time every configuration of a kernel at every size, then the best loops."""
    problem, backend = task.problem, suite.backend
    a, b = backend.operands(problem, problem.batch)
    out = empty_result(problem, a)
    best: dict[int, list[Timed]] = {}
    rows: list[tuple[object, ...]] = []
    sizes = divisors(problem.batch, suite.options.min_batch)
    checked = next((size for size in sizes if size <= CHECKED_BATCH), sizes[-1])
    for size in sizes:
        chunk = problem.with_batch(size)
        expected = (
            reference(chunk, *operands_of(problem, a, b, 0, size)) if size == checked else None
        )
        fastest = float("inf")
        proposed = {
            one.identity: one
            for one in backend.runtime.configurations(torch.cuda.current_device(), chunk)
        }
        for candidate in backend.candidates(chunk)[1:]:
            if (candidate.workspace_bytes or 0) > MOST_WORKSPACE:
                suite.skipped["workspace over 8 GiB"] += 1
                continue
            if f"{chunk} {candidate.algorithm}" in suite.faults:
                continue
            executable = backend.executable(chunk, candidate.algorithm)
            run = chunk_runner(problem, executable, a, b, out, size)
            errors = ("", "")
            try:
                with suite.guarded(chunk, candidate.algorithm):
                    if expected is not None:
                        first = operands_of(problem, a, b, 0, size)
                        errors = check(chunk, executable, *first, expected)
                    samples = sample(run, fastest)
            except (RuntimeError, UcudnnError) as error:
                suite.skipped[f"run: {str(error).splitlines()[0][:100]}"] += 1
                continue
            median = statistics.median(samples)
            fastest = min(fastest, median)
            one = proposed[candidate.algorithm]
            row = (one.workspace_bytes, one.mode, one.rank, "+".join(one.notes))
            numbers = (f"{median:.2f}", f"{min(samples):.2f}", len(samples), *errors)
            rows.append((*task.columns, size, candidate.algorithm, *row, *numbers))
            best.setdefault(size, []).append(Timed(median, candidate))
    del out
    timings.writerows(rows)
    compare_splits(suite, task, a, b, best, splits)


def divisors(batch: int, least: int) -> list[int]:
    """The batch, its half and so on, as far as they divide it.

    >>> divisors(12, 1), divisors(256, 64)
    ([12, 6, 3], [256, 128, 64])
    """
    sizes = [batch]
    while sizes[-1] % 2 == 0 and sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    return sizes


def operands_of(
    problem: Problem, a: Tensor, b: Tensor, start: int, size: int
) -> tuple[Tensor, Tensor]:
    part = slice(start, start + size)
    return (a[part], b[part]) if problem.op == "wgrad" else (a[part], b)


def empty_result(problem: Problem, like: Tensor) -> Tensor:
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    layout = formats[problem.rank] if problem.layout == "nhwc" else torch.contiguous_format
    return torch.zeros(problem.result_shape, dtype=like.dtype, device=like.device).contiguous(
        memory_format=layout
    )


def chunk_runner(
    problem: Problem, executable: Any, a: Tensor, b: Tensor, out: Tensor, size: int
) -> Callable[[], None]:
    """Runs one chunk after the other, as a loop over a batch does."""
    starts = list(range(0, problem.batch, size))
    total = out.float() if problem.op == "wgrad" and problem.bytes_per_element < 4 else out
    turn = 0

    def run() -> None:
        nonlocal turn
        start = starts[turn % len(starts)]
        turn += 1
        first, second = operands_of(problem, a, b, start, size)
        if problem.op != "wgrad":
            executable.write(first, second, out[start : start + size])
        elif size == problem.batch:
            executable.alone(first, second)
        else:
            executable.add(first, second, total)

    return run


def reference(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """The result in float64, by torch's own kernels without cuDNN."""
    from ucudnn.backends.cudnn.executable import DefaultExecutable

    with torch.backends.cudnn.flags(enabled=False):
        return DefaultExecutable(replace(problem, math="strict")).alone(a.double(), b.double())


def check(
    problem: Problem, executable: Any, a: Tensor, b: Tensor, expected: Tensor
) -> tuple[str, str]:
    """Relative errors: of a result written over NaN, and of one added to ones (wgrad)."""
    if problem.op != "wgrad":
        found = empty_result(problem, a).fill_(torch.nan)
        executable.write(a, b, found)
        return f"{relative_error(found, expected):.3g}", ""
    found = executable.alone(a, b)
    dtype = torch.promote_types(a.dtype, torch.float32)
    total = torch.ones_like(found, dtype=dtype)
    executable.add(a, b, total)
    return f"{relative_error(found, expected):.3g}", f"{relative_error(total - 1, expected):.3g}"


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def sample(run: Callable[[], object], fastest_us: float = float("inf")) -> list[float]:
    """Times of consecutive runs in microseconds: some milliseconds of them, one if it is slow."""
    run()
    first = elapsed_us(run, 1)[0]
    if first > TOO_SLOW * fastest_us + 50:
        return [first]
    return elapsed_us(run, max(5, min(40, int(4000 / max(first, 1.0)))))


def elapsed_us(run: Callable[[], object], count: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairwise(events)]


def compare_splits(
    suite: Suite, task: Task, a: Tensor, b: Tensor, best: dict[int, list[Timed]], splits: Any
) -> None:
    """Per limit the best loop as a plan runs it, beside the best undivided and torch's own."""
    problem, batch = task.problem, task.problem.batch
    default = whole(suite, problem, ((batch, DEFAULT_ALGORITHM),))
    torch.backends.cudnn.benchmark = False
    default_us = statistics.median(sample(lambda: default(a, b)))
    torch.backends.cudnn.benchmark = True
    parts = [(problem, DEFAULT_ALGORITHM)]
    # torch keeps the kernel of a shape per thread, whatever the flag said when it was chosen: in
    # this thread it would run the default's
    with ThreadPoolExecutor(1) as thread:
        bytes_taken = thread.submit(suite.backend.workspace_bytes, partial(default, a, b), parts)
        extra = bytes_taken.result()
        benchmark_us = statistics.median(thread.submit(sample, partial(default, a, b)).result())
    torch.backends.cudnn.benchmark = False
    for limit in map(int, suite.options.limits.split(",")):
        fitting = {
            size: min(within, key=lambda timed: timed.time_us)
            for size, found in best.items()
            if (within := [t for t in found if (t.candidate.workspace_bytes or 0) <= limit << 20])
        }
        if not fitting:
            suite.skipped["nothing fits the limit"] += 1
            continue
        undivided = fitting.get(batch)
        size, chosen = min(fitting.items(), key=lambda item: batch // item[0] * item[1].time_us)
        steps = ((size, chosen.candidate.algorithm),) * (batch // size)
        call = whole(suite, problem, steps)
        eager, host = statistics.median(sample(partial(call, a, b))), host_us(call, a, b)
        splits.writerow(
            (
                *(*task.columns, batch, limit),
                undivided.candidate.algorithm if undivided else "",
                f"{undivided.time_us:.2f}" if undivided else "",
                *(f"{default_us:.2f}", f"{benchmark_us:.2f}", f"{extra / 2**20:.1f}"),
                *(size, chosen.candidate.algorithm),
                f"{(chosen.candidate.workspace_bytes or 0) / 2**20:.1f}",
                f"{batch // size * chosen.time_us:.2f}",
                f"{eager:.2f}",
                captured_us(suite, call, a, b),
                f"{host / len(steps):.2f}",
            )
        )


def whole(suite: Suite, problem: Problem, steps: Sequence[tuple[int, str]]) -> Call:
    split = Split("batch", tuple(Step(size, name) for size, name in steps))
    return bind(suite.backend, problem, split)


def host_us(call: Call, a: Tensor, b: Tensor, count: int = 5) -> float:
    """What enqueuing a call takes on the host, median over an idle device."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call(a, b)
        times.append((time.perf_counter() - began) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def captured_us(suite: Suite, call: Call, a: Tensor, b: Tensor) -> str:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call(a, b)
    except RuntimeError as error:
        suite.skipped[f"capture: {str(error).splitlines()[0][:100]}"] += 1
        return ""
    return f"{statistics.median(sample(graph.replay)):.2f}"


def tune_layers(suite: Suite) -> None:
    """Plans of all layers at each limit; one cache, so that later limits measure little."""
    torch.backends.cudnn.benchmark = suite.options.benchmark
    cache = suite.folder / "cache"
    layers = [(task.name, task.problem) for task in suite.tasks()]
    for limit in map(int, suite.options.limits.split(",")):
        left = suite.deadline - time.monotonic()
        if left <= 0:
            suite.skipped["tune: time"] += 1
            continue
        config = Config(
            workspace_limit=limit << 20, cache=str(cache), backend="cudnn", time_budget_s=left
        )
        began = time.monotonic()
        try:
            plan = tune_problems(layers, config)
        except UcudnnError as error:
            suite.skipped[f"tune at {limit} MiB: {error}"] += 1
            continue
        plan.save(suite.folder / f"plan_{limit}mib.json")
        suite.answers[f"tune_{limit}mib_seconds"] = round(time.monotonic() - began, 1)
    from ucudnn.cache import commands

    count = commands.export(suite.folder / "recorded.csv", cache)
    suite.answers["recorded_measurements"] = count


if __name__ == "__main__":
    main()
