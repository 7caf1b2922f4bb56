"""Measure what a GPU does with the layers of some networks: tests first, then times, then plans.

    python benchmarks/gpu_suite.py results/h200 benchmarks/layers/alexnet_ucudnn_csv.csv \
        benchmarks/layers/resnet50_n256.csv --dtypes fp32,fp16 --seconds 480

Parts, in this order; --parts names some of them:

    tests     pytest tests/gpu: every engine configuration against float64, beta 1, alignment,
              remainders, capture, threads, training
    timings   every engine configuration of the layers, undivided and in micro-batches, then the
              best of them beside torch's default and cudnn.benchmark: timings.csv, splits.csv
    tune      plans of the layers at each limit, and the measurements as recorded.csv, which
              `ucudnn tune LAYERS --backend recorded --cache recorded.csv` replays without a GPU

Writes into the folder as it goes, so that what was measured stays when the time is over; starting
again goes on with what is not there yet. A configuration that faults or hangs is noted in
faults.json, and the script starts again without it. profile.json is the device as cuDNN describes
it, answers.json what else was found, provenance.json who measured what, when and in which state;
SOURCE_COMMIT in the environment tells it the commit where there is no .git.
`python benchmarks/gpu_tables.py FOLDER` prints what the timings say.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any, TextIO, TypeVar

import torch
from gpu_kernels import SPLITS, TIMINGS, time_kernel

from ucudnn import cache as caches
from ucudnn.backends.cudnn.api import Handle
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.backends.cudnn.engine import configurations
from ucudnn.backends.cudnn.graph import Target
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.config import Config
from ucudnn.errors import UcudnnError
from ucudnn.kernels.tune import tune_problems
from ucudnn.layer_table import read_rows
from ucudnn.problem import OPS, Problem

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
FIRST_LIMIT = 64  # MiB; the plan that is worth most, where there is time for one alone
LISTS = "lists_by_handle_equal_by_profile"
TESTS_S, TEST_S = 300, 60
# cuDNN does not promise that threads may share a plan: last, in a process of its own
THREADS = "tests/gpu/test_runs.py::test_threads_share_an_executable"


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

    @property
    def group(self) -> str:
        """The table of layers and the dtype."""
        return f"{self.name.partition(':')[0]} {self.dtype}"


class Suite:
    """State that all parts share; what earlier processes noted in the folder is part of it.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = Path(options.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.backend = CudnnBackend()
        self.deadline = time.monotonic() + options.seconds
        self.answers: dict[str, Any] = self.load("answers.json", {})
        self.skipped: Counter[str] = Counter(self.answers.pop("skipped", {}))
        self.lists: list[int] = self.answers.pop(LISTS, [0, 0])
        self.not_reached: dict[str, int] = self.answers.pop("not_reached", {})
        self.faults: list[str] = self.load("faults.json", [])

    def load(self, name: str, default: T) -> T:
        """A JSON file of the folder; the default where it is not there."""
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else default

    def save(self, name: str, value: object) -> None:
        """Write a JSON file of the folder, all or nothing."""
        temporary = self.folder / f"{name}.new"
        temporary.write_text(json.dumps(value, indent=1) + "\n")
        temporary.replace(self.folder / name)

    def save_answers(self) -> None:
        """Write what is known so far."""
        self.save(
            "answers.json",
            {
                **self.answers,
                "cudnn": self.backend.runtime.cudnn.version,
                "torch": torch.__version__,
                "gpu": torch.cuda.get_device_name(),
                LISTS: self.lists,
                "skipped": dict(self.skipped),
                "not_reached": {group: n for group, n in self.not_reached.items() if n},
            },
        )

    def attempt(self, what: str, run: Callable[[], T], label: str = "") -> T | None:
        """Run something on the GPU; None where it fails, now or in an earlier process.

        A failure is noted. Where it leaves the GPU useless to this process, or does not end, the
        script starts again without it.

        Args:
            what: unique name of what is run.
            run: runs it and waits for the device.
            label: under which failures are counted; default: `what`.
        """
        if what in self.faults:
            return None
        patience_s = self.backend.candidate_timeout_s
        timer = Timer(patience_s, self._start_anew, (what, f"no end within {patience_s:g} s"))
        timer.daemon = True
        timer.start()
        try:
            return run()
        except (RuntimeError, UcudnnError) as error:
            reason = f"{type(error).__name__} {str(error).splitlines()[0][:160]}"
            if self.backend.is_broken():
                self._start_anew(what, reason)
            self.skipped[f"{label or what}: {reason}"] += 1
            return None
        finally:
            timer.cancel()

    def _start_anew(self, what: str, reason: str) -> None:
        """Replace this process: a GPU context in which a kernel has faulted is of no more use."""
        self.skipped[f"{what}: {reason}"] += 1
        self.save_answers()
        self.save("faults.json", [*self.faults, what])
        parts = ",".join(part for part in self.options.parts.split(",") if part != "tests")
        seconds = str(max(1.0, self.deadline - time.monotonic()))
        arguments = [*sys.argv[1:], "--parts", parts, "--seconds", seconds]
        os.execv(sys.executable, [sys.executable, __file__, *arguments])

    @property
    def limits_mib(self) -> list[int]:
        """The workspace limits of the command line."""
        return [int(limit) for limit in self.options.limits.split(",")]

    @property
    def is_over(self) -> bool:
        """True where the time for measurements is over."""
        return time.monotonic() > self.deadline

    def tasks(self) -> Iterator[Task]:
        """Kernels, each once, in the order of the command line."""
        seen = set()
        for dtype in self.options.dtypes.split(","):
            for layout in self.options.layouts.split(","):
                for path in self.options.layers:
                    ops = self.options.ops.split(",")
                    for name, problem, *_ in read_rows(path, ops, DTYPES[dtype], layout):
                        math = "tf32" if dtype == "fp32" else "strict"
                        problem = replace(problem, math=math)  # noqa: PLW2901
                        if problem not in seen:
                            seen.add(problem)
                            yield Task(f"{Path(path).stem}:{name}", dtype, problem)


def main() -> None:
    suite = Suite(parse())
    parts: dict[str, Callable[[Suite], None]] = {
        "tests": run_tests,
        "timings": time_layers,
        "tune": tune_layers,
    }
    with provenance(suite):
        for name in suite.options.parts.split(","):
            began = time.monotonic()
            parts[name](suite)
            suite.answers[f"{name}_seconds"] = round(time.monotonic() - began, 1)
            suite.save_answers()
    found = {**suite.answers, "not_reached": suite.not_reached}
    print(json.dumps({**found, "skipped": dict(suite.skipped.most_common(12))}, indent=1))


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


@contextmanager
def provenance(suite: Suite) -> Iterator[None]:
    """Note who measures what and when, and the state of the GPU before and after."""
    runs = suite.load("provenance.json", [])
    record: dict[str, Any] = {
        "command": [Path(word).name if os.sep in word else word for word in sys.argv[1:]],
        "commit": commit(),
        "began": now(),
        "device": asdict(suite.backend.device()),
        "software": asdict(suite.backend.software()),
        "python": sys.version.split()[0],
        "before": suite.backend.state().notes,
    }
    suite.save("provenance.json", [*runs, record])  # a process that is replaced leaves this
    try:
        yield
    finally:
        record.update(after=suite.backend.state().notes, ended=now())
        suite.save("provenance.json", [*runs, record])
        suite.save_answers()


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def commit() -> str:
    """The checkout's commit, as SOURCE_COMMIT or git tells; empty where neither does."""
    told = os.environ.get("SOURCE_COMMIT", "")
    if told or not (ROOT / ".git").exists():
        return told
    asked = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=40"],
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip()


def run_tests(suite: Suite) -> None:
    """Run the tests in processes of their own: a kernel that faults ends them and not the rest."""
    options = ["-q", "-p", "no:cacheprovider"]
    if find_spec("pytest_timeout"):
        options += ["--timeout", str(TEST_S)]
    parallel = ["-n", "8"] if find_spec("xdist") else []
    commands = [[*parallel, "--deselect", THREADS, "tests/gpu"], [THREADS]]
    log = suite.folder / "tests.txt"
    summaries = []
    with log.open("w") as stream:
        for arguments in commands:
            try:
                subprocess.run(
                    [sys.executable, "-m", "pytest", *options, *arguments],
                    cwd=ROOT,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    timeout=TESTS_S,
                    check=False,
                )
                summaries.append(log.read_text(errors="replace").rstrip().rpartition("\n")[2])
            except subprocess.TimeoutExpired:
                summaries.append(f"stopped after {TESTS_S} s")
    suite.answers["tests"] = "; ".join(summaries)
    print(suite.answers["tests"], flush=True)


def time_layers(suite: Suite) -> None:
    """Time every kernel that the tables lack; a kernel's rows are written when all are known."""
    profile = read_profile(suite)
    with (
        appended(suite.folder / "timings.csv", TIMINGS) as (timings, timed),
        appended(suite.folder / "splits.csv", SPLITS) as (splits, compared),
    ):
        tasks = [
            task
            for task in suite.tasks()
            if (*task.columns, str(task.problem.batch)) not in timed | compared
        ]
        # of these tables nothing else is missing
        suite.not_reached.update({task.group: 0 for task in suite.tasks()})
        for task in tasks:
            if suite.is_over:
                suite.not_reached[task.group] += 1
                continue
            compare_lists(suite, task.problem, profile)
            found = time_kernel(suite, task.columns, task.problem)
            torch.cuda.empty_cache()
            csv.writer(timings).writerows(found.timings)
            csv.writer(splits).writerows(found.splits)
            timings.flush()
            splits.flush()
            suite.save_answers()


@contextmanager
def appended(path: Path, columns: Sequence[str]) -> Iterator[tuple[TextIO, set[tuple[str, ...]]]]:
    """A table to add to, and the kernels (name, op, dtype, layout, batch) that it has.

    In timings.csv these are all rows of a kernel, the micro-batches' too.
    """
    done = set()
    if path.exists():
        with path.open(newline="") as stream:
            keys = ("name", "op", "dtype", "layout", "batch")
            done = {tuple(row[key] for key in keys) for row in csv.DictReader(stream)}
    is_new = not path.exists()
    with path.open("a", newline="") as stream:
        if is_new:
            csv.writer(stream).writerow(columns)
            stream.flush()
        yield stream, done


def read_profile(suite: Suite) -> DeviceProfile | None:
    """Save the device as cuDNN describes it; None where it is not one to plan with."""
    cudnn = suite.backend.runtime.cudnn
    try:
        text = DeviceProfile.text_of_handle(cudnn, Handle(cudnn))
        suite.save("profile.json", json.loads(text))
        return DeviceProfile.parse(text, "of this device")
    except (UcudnnError, ValueError) as error:
        suite.answers["profile"] = str(error)
        return None


def compare_lists(suite: Suite, problem: Problem, profile: DeviceProfile | None) -> None:
    """Count problems for which cuDNN proposes the same by the profile as for the device itself."""
    if profile is None:
        return
    runtime = suite.backend.runtime
    try:
        here = runtime.configurations(torch.cuda.current_device(), problem)
        device = profile.descriptor(runtime.cudnn)
        elsewhere = configurations(Target(runtime.cudnn, device=device), problem)
    except UcudnnError as error:
        suite.skipped[f"lists by profile: {str(error).splitlines()[0][:160]}"] += 1
        return
    suite.lists[0] += here == elsewhere
    suite.lists[1] += 1


def tune_layers(suite: Suite) -> None:
    """Plan all layers at each limit; one cache, so that later limits measure little."""
    torch.backends.cudnn.benchmark = suite.options.benchmark
    cache = suite.folder / "cache"
    layers = [(task.name, task.problem) for task in suite.tasks()]
    limits = sorted(suite.limits_mib, key=lambda limit: limit != FIRST_LIMIT)
    for place, limit in enumerate(limits):
        left = suite.deadline - time.monotonic()
        if left <= 0:
            suite.skipped[f"tune at {limit} MiB: time"] += 1
            continue
        config = Config(
            workspace_limit=limit << 20,
            cache=str(cache),
            backend="cudnn",
            time_budget_s=left / (len(limits) - place),
        )
        began = time.monotonic()
        try:
            plan = tune_problems(layers, config)
        except UcudnnError as error:
            suite.skipped[f"tune at {limit} MiB: {error}"] += 1
            continue
        plan.save(suite.folder / f"plan_{limit}mib.json")
        suite.answers[f"tune_{limit}mib_seconds"] = round(time.monotonic() - began, 1)
        suite.save_answers()
    with caches.open(cache, "r") as measured:
        suite.answers["recorded_measurements"] = measured.export(suite.folder / "recorded.csv")


if __name__ == "__main__":
    main()
