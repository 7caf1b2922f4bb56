"""Cliffs of torch's own convolutions: kernels that a split, an algorithm or a layout makes cheaper.

Each convolution of a step is timed as torch runs it, and beside it whatever computes the same: its
micro-batches, other algorithms, channels-last operands, another dtype. A cliff is where one of them
is far cheaper; its kind says what the difference is due to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from time import monotonic
from typing import Any

import torch

from ucudnn.backends import AbstractBackend
from ucudnn.backends.torch_cpu.allocator import (
    GLIBC_MMAP_THRESHOLD,
    LARGE_MMAP_THRESHOLD,
    LARGE_THRESHOLD_TUNABLES,
    describe_allocator,
    set_mmap_threshold,
)
from ucudnn.benchmark.statistics import median_ns
from ucudnn.config import Config
from ucudnn.errors import UnsupportedError
from ucudnn.execution.execute import bind
from ucudnn.measurement import Device
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.split import DEFAULT_ALGORITHM, KernelPlan, Split, Step, Timing
from ucudnn.tuning.remedies import remedied_kernel
from ucudnn.units import format_bytes, format_ns

# A remedy must be this many times faster: less is worth tuning for, and is no cliff.
_CLIFF = 1.5
# Rounds in which torch's own and the best remedies take turns.
_ROUNDS, _MOST_REMEDIES = 5, 2
# Many implementations count elements with 32 bits.
_MOST_ELEMENTS = 2**31 - 1
_MOST_S = 120.0

OnKernel = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Cliff:
    """One convolution that is far slower than it has to be.

    Args:
        problem: as the step computes it.
        layers: names of the layers, one per call.
        kind: what the cost is due to: "strided data gradient", "layout copy", "heuristics switch",
            "allocator threshold", "2^31 elements", "dtype" or "slow kernel".
        remedy: what removes it.
        time_ns: of one call by torch.
        remedied_ns: of one call with the remedy, timed in turn with it.
        workspace_bytes: of one call by torch.
        remedied_bytes: workspace with the remedy.
        split: that is the remedy; None where another layout, dtype or malloc is.
    """

    problem: Problem
    layers: tuple[str, ...]
    kind: str
    remedy: str
    time_ns: int
    remedied_ns: int
    workspace_bytes: int
    remedied_bytes: int
    split: Split | None = None

    @property
    def saved_ns(self) -> int:
        """Time that the remedy saves in a step, over all calls."""
        return (self.time_ns - self.remedied_ns) * len(self.layers)

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.problem} takes {format_ns(self.time_ns)} in "
            f"{format_bytes(self.workspace_bytes)}, {self.time_ns / self.remedied_ns:.1f} times "
            f"the {format_ns(self.remedied_ns)} in {format_bytes(self.remedied_bytes)} with "
            f"{self.remedy}; that saves {format_ns(self.saved_ns)} of a step "
            f"({len(self.layers)} calls)"
        )


@dataclass(frozen=True, slots=True)
class Cliffs:
    """Result of a scan; of several cliffs of one kernel the savings do not add up.

    Args:
        found: those that save most in a step first.
        device: that it holds for.
        convolutions_ns: time of all scanned convolutions of a step, by torch.
        scanned: number of distinct convolutions that were timed.
        total: number of distinct convolutions of the step.
        is_perturbed: others used the processors meanwhile, so that times are too long.
        plan: all scanned kernels, with the splits that are proposed; None where nothing was
            scanned.
    """

    found: tuple[Cliff, ...]
    device: Device
    convolutions_ns: int
    scanned: int
    total: int
    is_perturbed: bool = False
    plan: Plan | None = None

    def sentences(self) -> list[str]:
        """Each cliff, and how much was looked at."""
        said = [f"{cliff}." for cliff in self.found]
        looked = (
            f"Scanned {self.scanned} of {self.total} convolutions, which take "
            f"{format_ns(self.convolutions_ns)} of a step on {self.device}"
        )
        said += self._applied_by()
        said.append(f"{looked}{'.' if self.found else ': no cliffs.'}")
        if self.is_perturbed:
            said.append("Other processes used the machine: scan again when it is quiet.")
        return said

    def _applied_by(self) -> list[str]:
        """How to apply each kind of remedy that was found."""
        remedies = dict.fromkeys(one.remedy for one in self.found if one.split is None)
        lines = {
            "channels_last": "model.to(memory_format=torch.channels_last), in 3-D channels_last_3d",
            "float32": "model.float(), without autocast",
        }
        said = [f"Apply {one}: {lines[one]}." for one in remedies if one in lines]
        # A setting of the process, which is read before Python runs.
        said += [f"Apply: {one} python SCRIPT." for one in remedies if one not in lines]
        if any(one.split is not None for one in self.found):
            said.append(
                "Apply splits and algorithms: add --output cliffs.plan.json to this command, then "
                "ucudnn run --plan cliffs.plan.json -- SCRIPT, or in Python "
                'ucudnn.installed("cliffs.plan.json").'
            )
        return said

    def to_dict(self) -> dict[str, Any]:
        """All but the plan, as JSON values."""
        listed = [
            {**asdict(one), "problem": one.problem.to_dict(), "saved_ns": one.saved_ns}
            for one in self.found
        ]
        values = asdict(replace(self, found=(), plan=None))
        del values["plan"]
        return {**values, "found": listed, "device": str(self.device)}


@dataclass(frozen=True, slots=True)
class _Remedy:
    """Something that computes the same.

    Args:
        problem: with the layout and dtype of the remedy.
        split: that computes it.
        said: what to do, for a sentence.
    """

    problem: Problem
    split: Split
    said: str


def large_blocks_stay() -> bool:
    """Let malloc keep large blocks of this process for reuse; False where there is no such setting.

    It cannot be undone: use it in a process that ends after the scan.
    """
    if describe_allocator() != "glibc":
        return False
    set_mmap_threshold(LARGE_MMAP_THRESHOLD)
    return True


def find_cliffs(
    layers: Mapping[Problem, tuple[str, ...]],
    backend: AbstractBackend,
    keep_blocks: Callable[[], bool] | None = None,
    on_kernel: OnKernel = lambda *_: None,
) -> Cliffs:
    """Scan the convolutions of a step, the largest first, for two minutes at most.

    Args:
        layers: names of the layers of each distinct problem.
        backend: of the device.
        keep_blocks: lets malloc keep large blocks, such as `large_blocks_stay`, and says whether it
            could; torch's own convolutions with large blocks are then timed once more. None: leave
            malloc as it is.
        on_kernel: called after every kernel, with how many are done and how many there are.
    """
    # Load is what others used since it was last asked for.
    backend.state()
    # Of a plan they are those of before the scan changes malloc.
    conditions = backend.conditions()
    scan = _Scan(backend, monotonic() + _MOST_S)
    found: list[Cliff] = []
    # Function modes of the caller would change where operands are allocated.
    with torch.no_grad(), torch._C.DisableTorchFunction():
        for problem in sorted(layers, key=lambda p: -p.flops * len(layers[p])):
            found += scan.cliffs(problem, layers[problem])
            on_kernel(len(scan.own_ns), len(layers))
        # Last, because times before and after it cannot be compared with each other.
        if keep_blocks is not None and keep_blocks():
            found += scan.allocator_cliffs(layers)
    found.sort(key=lambda cliff: -cliff.saved_ns)
    total_ns = sum(time_ns * len(layers[problem]) for problem, time_ns in scan.own_ns.items())
    busy = backend.state().load > 0
    kernels = scan.kernels(layers, found)
    place = (backend.device(), backend.software(), conditions)
    plan = Plan(kernels, *place, Config(), backend.name) if kernels else None
    counts = len(scan.own_ns), len(layers), busy
    return Cliffs(tuple(found), backend.device(), total_ns, *counts, plan)


class _Scan:
    """Times convolutions and what could replace them, until the time is over."""

    def __init__(self, backend: AbstractBackend, until: float) -> None:
        self._backend = backend
        self._until = until
        # Times and workspaces of torch's own, of what was scanned.
        self.own_ns: dict[Problem, int] = {}
        self._own_bytes: dict[Problem, int] = {}
        self._operands: dict[Problem, tuple[torch.Tensor, torch.Tensor]] = {}

    def cliffs(self, problem: Problem, layers: tuple[str, ...]) -> list[Cliff]:
        """The cliff of a convolution, if it is on one."""
        self._operands.clear()
        own = _Remedy(problem, _undivided(problem, DEFAULT_ALGORITHM), "torch's own convolution")
        own_ns = self._shortest_ns(own)
        if own_ns is None:
            return []
        self.own_ns[problem], self._own_bytes[problem] = own_ns, self._workspace(own)
        tried = self._timed(self._undivided_remedies(problem, own_ns))
        # Scanning every algorithm at every size would take minutes: the fastest are divided.
        names = [remedy.split.steps[0].algorithm for _, remedy in tried[:_MOST_REMEDIES]]
        tried += self._timed(self._splits(problem, dict.fromkeys([DEFAULT_ALGORITHM, *names])))
        # Of what takes as long, the one with the fewest chunks.
        tried.sort(key=lambda entry: (entry[0], len(entry[1].split.steps)))
        best = [remedy for time_ns, remedy in tried if time_ns * _CLIFF <= own_ns]
        best = best[:_MOST_REMEDIES]
        if not best:
            return []
        own_ns, *times = self._in_turn([own, *best])
        self.own_ns[problem] = own_ns
        time_ns, remedy = min(zip(times, best, strict=True), key=lambda one: one[0])
        if time_ns * _CLIFF > own_ns:
            return []
        sizes = self._own_bytes[problem], self._workspace(remedy)
        kind = self._kind(problem, remedy)
        split = remedy.split if remedy.problem == problem else None
        return [Cliff(problem, layers, kind, remedy.said, own_ns, time_ns, *sizes, split)]

    def kernels(
        self, layers: Mapping[Problem, tuple[str, ...]], found: Iterable[Cliff]
    ) -> tuple[KernelPlan, ...]:
        """Plans of all kernels that were scanned, by the splits of cliffs and else by torch."""
        by_problem = {cliff.problem: cliff for cliff in found if cliff.split is not None}
        kernels = []
        for problem, own_ns in self.own_ns.items():
            default = Timing(own_ns, 0, self._own_bytes[problem], _ROUNDS)
            cliff, own = by_problem.get(problem), _undivided(problem, DEFAULT_ALGORITHM)
            split, timing = own, default
            if cliff is not None and cliff.split is not None:
                split = cliff.split
                timing = Timing(cliff.remedied_ns, 0, cliff.remedied_bytes, _ROUNDS)
            kernels.append(remedied_kernel(problem, layers[problem], split, timing, default))
        return tuple(kernels)

    def _timed(self, remedies: Iterator[_Remedy]) -> list[tuple[int, _Remedy]]:
        """Algorithms that can be run, with their shortest times, the fastest first."""
        found = [(self._shortest_ns(remedy), remedy) for remedy in remedies]
        timed = [(time_ns, remedy) for time_ns, remedy in found if time_ns is not None]
        return sorted(timed, key=lambda entry: entry[0])

    def allocator_cliffs(self, layers: Mapping[Problem, tuple[str, ...]]) -> Iterator[Cliff]:
        """Cliffs of convolutions with blocks that malloc gave back, now that it keeps them."""
        remedy = f"GLIBC_TUNABLES={LARGE_THRESHOLD_TUNABLES}"
        for problem, own_ns in self.own_ns.items():
            size = self._own_bytes[problem]
            if max(size, problem.result_bytes) < GLIBC_MMAP_THRESHOLD:
                continue
            own = _Remedy(problem, _undivided(problem, DEFAULT_ALGORITHM), "")
            self._operands.clear()
            # The first run takes the blocks from the system, later ones find them.
            if self._shortest_ns(own) is not None:
                (time_ns,) = self._in_turn([own])
                if time_ns * _CLIFF <= own_ns:
                    kind = "allocator threshold"
                    yield Cliff(problem, layers[problem], kind, remedy, own_ns, time_ns, size, size)

    def _undivided_remedies(self, problem: Problem, own_ns: int) -> Iterator[_Remedy]:
        """Other algorithms, layouts and dtypes that compute the batch at once."""
        for candidate in self._backend.candidates(problem)[1:]:
            name = candidate.algorithm
            if self._may_be_faster(problem, name, own_ns):
                yield _Remedy(problem, _undivided(problem, name), f"the algorithm {name}")
        if problem.rank > 1 and problem.layout == "nchw":
            last = replace(problem, layout="nhwc")
            yield _Remedy(last, _undivided(last, DEFAULT_ALGORITHM), "channels_last")
        if problem.bytes_per_element == 2:
            single = replace(problem, dtype="float32")
            yield _Remedy(single, _undivided(single, DEFAULT_ALGORITHM), "float32")

    def _splits(self, problem: Problem, names: Iterable[str]) -> Iterator[_Remedy]:
        """Micro-batches of powers of two that fill the batch."""
        batch = problem.batch
        sizes = [1 << k for k in range(batch.bit_length()) if 1 << k < batch]
        for size in (size for size in sizes if batch % size == 0):
            part = problem.with_batch(size)
            for name in names:
                if self._backend.refusal(part, name) is None:
                    split = Split("batch", (Step(size, name),) * (batch // size))
                    yield _Remedy(problem, split, f"the split {split}")

    def _may_be_faster(self, problem: Problem, algorithm: str, own_ns: int) -> bool:
        cost = self._backend.cost(problem, algorithm)
        if cost is None:
            return True
        roofline = self._backend.roofline(problem.dtype)
        least_ns = 0 if roofline is None else roofline.time_ns(cost)
        fits = cost.workspace_bytes <= self._backend.memory_bytes()
        return fits and least_ns * _CLIFF <= own_ns

    def _kind(self, problem: Problem, remedy: _Remedy) -> str:
        """Cause of the cost of a convolution, by the remedy that removes it."""
        shapes = (*problem.operand_shapes, problem.result_shape)
        (first, *_), kernel = remedy.split.steps, self._backend.kernel
        part = problem.with_batch(first.size)
        switches = first.algorithm == DEFAULT_ALGORITHM and kernel(
            part, DEFAULT_ALGORITHM
        ) != kernel(problem, DEFAULT_ALGORITHM)
        largest = max(self._own_bytes[problem], problem.result_bytes)
        kinds = {
            "2^31 elements": max(map(prod, shapes)) > _MOST_ELEMENTS,
            "dtype": remedy.problem.dtype != problem.dtype,
            "strided data gradient": problem.op == "dgrad" and max(problem.stride) > 1,
            "layout copy": remedy.problem.layout != problem.layout,
            "heuristics switch": len(remedy.split.steps) > 1 and switches,
            # A split of the same kernel has smaller blocks, and nothing else.
            "allocator threshold": len(remedy.split.steps) > 1
            and first.algorithm == DEFAULT_ALGORITHM
            and largest >= GLIBC_MMAP_THRESHOLD,
            "slow kernel": True,
        }
        return next(kind for kind, holds in kinds.items() if holds)

    def _shortest_ns(self, remedy: _Remedy) -> int | None:
        """The shorter time of two runs; None if it cannot be run, or the time is over."""
        if monotonic() >= self._until:
            return None
        try:
            call, _ = self._call(remedy)
            return max(1, min(self._backend.elapsed_ns(call) for _ in range(2)))
        # What cannot run by itself, as for lack of memory, is no remedy.
        except (RuntimeError, MemoryError, UnsupportedError):
            return None

    def _workspace(self, remedy: _Remedy) -> int:
        return self._backend.workspace_bytes(*self._call(remedy))

    def _in_turn(self, remedies: list[_Remedy]) -> list[int]:
        """Medians of several rounds."""
        calls = [self._call(remedy)[0] for remedy in remedies]
        samples: list[list[int]] = [[] for _ in calls]
        for _ in range(_ROUNDS):
            for taken, call in zip(samples, calls, strict=True):
                taken.append(max(1, self._backend.elapsed_ns(call)))
        return [median_ns(taken) for taken in samples]

    def _call(
        self, remedy: _Remedy
    ) -> tuple[Callable[[], torch.Tensor], list[tuple[Problem, str]]]:
        call = bind(self._backend, remedy.problem, remedy.split)
        # Drawing them takes longer than many a convolution: those of one layout and dtype are kept.
        if remedy.problem not in self._operands:
            drawn = self._backend.operands(remedy.problem, remedy.problem.batch)
            self._operands[remedy.problem] = drawn
        return partial(call, *self._operands[remedy.problem]), call.parts


def _undivided(problem: Problem, algorithm: str) -> Split:
    return Split("batch", (Step(problem.batch, algorithm),))
