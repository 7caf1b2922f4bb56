"""Training steps of one network in several variants, each in its own process, timed in turn.

A variant has a process of its own because torch remembers per thread which convolution kernel it
took for a shape, whatever cudnn.benchmark said at that time: in one process the second variant
would run the kernels of the first. It also keeps each peak of memory apart. Only one process works
at a time. Before and after its turn a process gives its cached memory back.

A variant is written as parts joined by "+": eager, channels_last, benchmark (cudnn.benchmark, which
tries the first ten of cuDNN's engines), benchmark@all (all of them), compile (torch.compile),
ucudnn@64MiB or ucudnn@none (the workspace limit), and wscap@64 (CUDNN_CONV_WSCAP_DBG, in MiB).
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.units import format_ns

PARTS = ("eager", "channels_last", "benchmark", "compile", "ucudnn", "wscap")
DTYPES = ("tf32", "fp32", "fp16", "bf16")
LEAST_BLOCK_NS = 100_000_000  # steps between two clock readings take at least this long
LEAST_SAMPLES = 3
# what setting up may take of the time: the rest is for the rounds
RIVALS_SHARE, LAST_SHARE = 0.5, 0.85
TUNING_SHARE = 0.6  # of the time that setting up has: the rest is for starting and warming up
LATE = "no answer"
OUT_OF_MEMORY = "out of memory"
Reply = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One process to run.

    Args:
        network: a name of step_models.NETWORKS.
        variant: parts joined by "+".
        dtype: "tf32", "fp32" (without TF32), or autocast to "fp16" or "bf16".
        batch: samples; the largest that is planned.
        device: "cuda" or "cpu".
        small: the small network, for a look on any machine.
        train: False: forward only, without gradients.
        memory_gib: what torch's allocator may take after tuning; None: all there is.
        config: further settings of `ucudnn.Config`.
        plan: a file to follow instead of tuning.
        deterministic: torch's deterministic algorithms wherever it has one.
    """

    network: str
    variant: str
    dtype: str
    batch: int
    device: str = "cuda"
    small: bool = False
    train: bool = True
    memory_gib: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    plan: str | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or self.dtype not in DTYPES:
            raise ValueError(
                f"a variant has parts {', '.join(PARTS)} and a dtype of {', '.join(DTYPES)}, got "
                f"{self.variant!r}, {self.dtype!r}"
            )

    @property
    def parts(self) -> dict[str, str]:
        """The parts of the variant with what follows their "@"."""
        pairs = (part.partition("@") for part in self.variant.split("+"))
        return {name: value for name, _, value in pairs}

    @property
    def case(self) -> tuple[str, str, int]:
        """The fields that variants have in common: they are compared within it."""
        return self.network, self.dtype, self.batch


class Worker:
    """The process of one job, which answers one question at a time.

    Args:
        job: what it runs.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        environment = dict(os.environ)
        if "wscap" in job.parts:
            environment["CUDNN_CONV_WSCAP_DBG"] = job.parts["wscap"]
        if job.deterministic:
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            bufsize=1,
        )

    def ask(self, question: str, timeout_s: float, **arguments: Any) -> Reply:
        """The answer, or {"failed": reason}: a process that is late or gone fails for good."""
        if timeout_s <= 0:
            return {"failed": "not reached in time"}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"question": question, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            return {"failed": f"its process ended with {self._process.wait()}"}
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready:
            self._process.kill()
            return {"failed": f"{LATE} to {question!r} in {timeout_s:.0f} s"}
        line = self._process.stdout.readline()
        if not line:
            return {"failed": f"its process ended with {self._process.wait()}"}
        reply: Reply = json.loads(line)
        return reply

    def set_up(self, deadline: float, warm_batch: int | None = None) -> Reply:
        """Let it tune or compile, and take its first steps.

        Args:
            deadline: of `time.monotonic`.
            warm_batch: of the first steps; None: that of the job.
        """
        left = deadline - time.monotonic()
        batch, job = warm_batch or self.job.batch, self.job
        if "ucudnn" in job.parts and job.plan is None:
            budget = min(TUNING_SHARE * left, job.config.get("time_budget_s", left))
            job = replace(job, config={**job.config, "time_budget_s": max(1.0, budget)})
        return self.ask("setup", left, job=asdict(job), warm_batch=batch)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@dataclass
class Run:
    """Measurements of one job.

    Args:
        job: what was run.
        setup: seconds of tuning and warm-up, versions, what the plan does, peaks of memory so far.
        samples_ns: mean time of a step, one per round in which all variants took turns.
        early_ns: likewise, of rounds before the variants that tune were there.
        memory: peaks in bytes of the steps that were timed.
        failed: why it is not complete.
    """

    job: Job
    setup: Reply = field(default_factory=dict)
    samples_ns: list[int] = field(default_factory=list)
    early_ns: list[int] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    failed: str | None = None

    @property
    def is_complete(self) -> bool:
        """True where nothing more can be expected of it: enough samples, or a failure.

        One that was late may be in time where its measurements are in the cache.
        """
        if self.failed is not None:
            return not self.failed.startswith(LATE)
        return len(self.samples_ns) >= LEAST_SAMPLES

    def add(self, reply: Reply, samples_ns: list[int]) -> None:
        """Take over one round into one of the lists of samples."""
        if "failed" in reply:
            self.failed = reply["failed"]
            return
        samples_ns.append(reply["step_ns"])
        for name, peak in reply["memory"].items():
            self.memory[name] = max(peak, self.memory.get(name, 0))


def measure(
    jobs: Sequence[Job], rounds: int, deadline: float, on_update: Callable[[list[Run]], None]
) -> list[Run]:
    """Set up jobs, then time them in turn; stops at the deadline.

    Variants that do not tune come first, with some rounds of their own: whatever tuning takes, they
    have their times. Each of the others then has an equal share of the time that the common rounds
    leave. What the deadline cut off is neither a sample nor a failure.

    Args:
        jobs: of one case.
        rounds: samples per job.
        deadline: of `time.monotonic`.
        on_update: called with all runs after every answer, to save them.
    """
    runs = [Run(job) for job in jobs]
    workers = [Worker(job) for job in jobs]
    case = _Case(runs, workers, deadline, on_update)
    rivals = [place for place, job in enumerate(jobs) if "ucudnn" not in job.parts]
    rivals.sort(key=lambda place: "compile" in jobs[place].parts)  # it may take long
    ours = [place for place in range(len(jobs)) if place not in rivals]
    try:
        case.set_up(rivals, RIVALS_SHARE if ours else LAST_SHARE, are_equal=False)
        if ours:
            case.take_rounds(rivals, min(rounds, LEAST_SAMPLES), early=True)
            case.set_up(ours, LAST_SHARE, are_equal=True)
        case.take_rounds([*rivals, *ours], rounds)
    finally:
        for worker in workers:
            worker.close()
    return runs


@dataclass
class _Case:
    """Runs of one case with their processes, and the time that they have together."""

    runs: list[Run]
    workers: list[Worker]
    deadline: float
    on_update: Callable[[list[Run]], None]

    def set_up(self, places: Sequence[int], share: float, are_equal: bool) -> None:
        """Set up some of the runs one after the other, within a share of the time that is left.

        Args:
            places: of the runs.
            share: of the time until the deadline.
            are_equal: True: each has an equal part of it; False: what those before it left.
        """
        until = time.monotonic() + share * (self.deadline - time.monotonic())
        for done, place in enumerate(places):
            left = until - time.monotonic()
            own = left / (len(places) - done) if are_equal else left
            reply = self.workers[place].set_up(time.monotonic() + own)
            if self._is_over:
                return
            run = self.runs[place]
            run.setup, run.failed = reply, reply.get("failed")
            self.on_update(self.runs)

    def take_rounds(self, places: Sequence[int], rounds: int, early: bool = False) -> None:
        """Time some of the runs in turn."""
        for _ in range(rounds):
            for place in places:
                run = self.runs[place]
                if self._is_over:
                    return
                if run.failed is not None or not run.setup:
                    continue
                count = max(1, LEAST_BLOCK_NS // max(1, run.setup["step_ns"]))
                left = self.deadline - time.monotonic()
                reply = self.workers[place].ask("steps", left, batch=run.job.batch, count=count)
                if self._is_over:
                    return
                run.add(reply, run.early_ns if early else run.samples_ns)
                self.on_update(self.runs)

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self.deadline


def usual_options(description: str | None, files: str) -> argparse.ArgumentParser:
    """A parser of what all scripts of steps and demonstrations take.

    Args:
        description: the script's docstring.
        files: that it writes into --out.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help=f"folder of {files}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--config", type=json.loads, default={}, help="JSON for ucudnn.Config")
    return parser


def save(path: Path, runs: Iterable[Run], **more: Any) -> None:
    """Write runs and what else was found to a JSON file, all or nothing."""
    document = {"format": "ucudnn-steps", **more, "runs": [asdict(run) for run in runs]}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)


def load(path: Path) -> list[Run]:
    """The runs of a file that `save` wrote; none where there is no file."""
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    return [Run(**{**one, "job": Job(**one["job"])}) for one in document["runs"]]


def report(runs: Iterable[Run]) -> Iterator[str]:
    """A Markdown table per case: step, ratio to eager, memory, and what it cost beforehand."""
    runs = sorted(runs, key=lambda run: run.job.case)
    for case, members in groupby(runs, lambda run: run.job.case):
        rows = list(members)
        eager = next((run for run in rows if run.job.variant == "eager"), None)
        network, dtype, batch = case
        yield f"### {network}, {dtype}, N={batch}{_machine(rows)}\n"
        yield "| variant | step | eager over this | reserved | tuning | warm-up | samples |"
        yield "|---|---|---|---|---|---|---|"
        for run in rows:
            yield f"| {' | '.join(_cells(run, eager))} |"
        yield ""


def _machine(runs: Sequence[Run]) -> str:
    machine = next((run.setup["machine"] for run in runs if "machine" in run.setup), None)
    if machine is None:
        return ""
    return f" on {machine['device']} (torch {machine['torch']}, cuDNN {machine['cudnn']})"


def _cells(run: Run, eager: Run | None) -> list[str]:
    name = run.job.variant
    taken = max(run.samples_ns, run.early_ns, key=len)
    if not taken:
        return [name, run.failed or "not reached", "", "", *_costs(run), "0"]
    step = f"{format_ns(median_ns(taken))} ± {format_ns(spread_ns(taken))}"
    ratio = "" if taken is run.samples_ns else "timed before the others"
    if taken is run.samples_ns and eager is not None and eager.samples_ns:
        middle, low, high = compare(eager, run)
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    reserved = f"{run.memory['reserved'] / 2**30:.2f} GiB" if "reserved" in run.memory else ""
    note = f" ({run.failed})" if run.failed else ""
    return [name, step + note, ratio, reserved, *_costs(run), str(len(taken))]


def _costs(run: Run) -> tuple[str, str]:
    tune, warm = run.setup.get("tune_s"), run.setup.get("warm_s")
    return (f"{tune:.0f} s" if tune else "", f"{warm:.0f} s" if warm else "")


def compare(numerator: Run, denominator: Run) -> tuple[float, float, float]:
    """The median ratio of steps of the same rounds with its 95 % interval."""
    pairs = list(zip(numerator.samples_ns, denominator.samples_ns, strict=False))
    return ratio_interval([a for a, _ in pairs], [b for _, b in pairs])


def verdict(meets: bool, misses: bool) -> str:
    """The word for a claim: decided only where its whole 95 % interval is on one side."""
    return "HOLDS" if meets else "DOES NOT HOLD" if misses else "UNDECIDED"


def fastest(runs: Iterable[Run], ours: bool) -> Run | None:
    """The fastest of the variants that use ucudnn, or of the others."""
    able = [run for run in runs if run.samples_ns and ("ucudnn" in run.job.parts) == ours]
    return min(able, key=lambda run: median_ns(run.samples_ns), default=None)


def serve(lines: IO[str], answers: IO[str]) -> None:
    """Answer questions until there are no more."""
    from step_runner import Runner  # which loads torch: here, because only processes need it

    runner: Runner | None = None
    for line in lines:
        question = json.loads(line)
        kind = question.pop("question")
        try:
            if kind == "setup":
                runner = Runner(Job(**question["job"]))
                reply = runner.setup(question["warm_batch"])
            else:
                assert runner is not None
                reply = getattr(runner, kind)(**question)
        except MemoryError:
            reply = {"failed": OUT_OF_MEMORY}
        except Exception as error:  # noqa: BLE001 - a variant that fails is a result
            name = type(error).__name__
            reason = OUT_OF_MEMORY if name == "OutOfMemoryError" else f"{name}: {error}"
            reply = {"failed": reason[:400]}
        if runner is not None:
            runner.release()
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as own:
        os.dup2(2, 1)  # what libraries print does not reach the answers
        serve(sys.stdin, own)
