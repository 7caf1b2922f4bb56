"""Find the cliffs of a step: scan its convolutions alone, then time what was found in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from time import monotonic

import torch

from ucudnn.backends import AbstractBackend
from ucudnn.backends.torch_cpu.allocator import (
    GLIBC_MMAP_THRESHOLD,
    LARGE_MMAP_THRESHOLD,
    LARGE_THRESHOLD_TUNABLES,
    describe_allocator,
    set_mmap_threshold,
)
from ucudnn.config import Config
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.tuning.cliffs.found import CHANNELS_LAST, Cliff, Cliffs
from ucudnn.tuning.cliffs.scan import LEAST_RATIO, Scan
from ucudnn.tuning.cliffs.step_timer import Setting, StepTimer, StepTimes

_MOST_S = 120.0
# Of a step; what saves less is within the noise of most machines.
_LEAST_SHARE = 0.005
_TORCH, _PLAN = "torch", "plan"

OnKernel = Callable[[int, int], None]


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
    steps: StepTimer | None = None,
) -> Cliffs:
    """Scan the convolutions of a step, the largest first, for two minutes at most.

    Args:
        layers: names of the layers of each distinct problem.
        backend: of the device.
        keep_blocks: lets malloc keep large blocks, such as `large_blocks_stay`, and says whether it
            could; torch's own convolutions with large blocks are then timed once more. None: leave
            malloc as it is.
        on_kernel: called after every kernel, with how many are done and how many there are.
        steps: of the model, in which torch's own kernels and those of the cliffs are then timed
            once more, for two minutes at most; None: what the scan found stands.
    """
    # Load is what others used since it was last asked for.
    backend.state()
    # Of a plan they are those of before the scan changes malloc.
    conditions = backend.conditions()
    search = _Search(layers, backend)
    search.scan_all(on_kernel)
    reason = "" if steps is None else steps.reason_against()
    timer = None if reason else steps
    if timer is not None and not search.time_in_steps(timer):
        timer, reason = None, "the step fails"
    # Last, because times before and after it cannot be compared with each other.
    if keep_blocks is not None and keep_blocks():
        search.add_allocator_cliffs(timer)
    found = sorted(search.found, key=lambda cliff: -cliff.saved_ns)
    named = [one for one in found if one.saved_ns >= _LEAST_SHARE * search.step_ns]
    kernels = search.scan.kernels(layers, named)
    place = (backend.device(), backend.software(), conditions)
    return Cliffs(
        tuple(named),
        backend.device(),
        convolutions_ns=sum(ns * len(layers[p]) for p, ns in search.scan.own_ns.items()),
        scanned=len(search.scan.own_ns),
        total=len(layers),
        is_perturbed=backend.state().load > 0,
        plan=Plan(kernels, *place, Config(), backend.name) if kernels else None,
        step_ns=search.step_ns,
        no_step=reason,
        unnamed=len(found) - len(named),
    )


class _Search:
    """What is known of the cliffs of a step.

    Attributes:
        scan: of its convolutions, each alone.
        found: cliffs so far.
        step_ns: time of a step by torch; 0 if none was run.

    Args:
        layers: names of the layers of each distinct problem.
        backend: of the device.
    """

    def __init__(self, layers: Mapping[Problem, tuple[str, ...]], backend: AbstractBackend) -> None:
        self.scan = Scan(backend, monotonic() + _MOST_S)
        self.found: list[Cliff] = []
        self.step_ns = 0
        self._layers = layers
        self._backend = backend

    def scan_all(self, on_kernel: OnKernel) -> None:
        """Time each convolution alone, and what could replace it."""
        # Function modes of the caller would change where operands are allocated.
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for problem in sorted(self._layers, key=lambda p: -p.flops * len(self._layers[p])):
                self.found += self.scan.cliffs(problem, self._layers[problem])
                on_kernel(len(self.scan.own_ns), len(self._layers))

    def time_in_steps(self, timer: StepTimer) -> bool:
        """Replace the times by those in whole steps; False if a step fails."""
        settings = {_TORCH: Setting()}
        if any(one.split is not None for one in self.found):
            settings[_PLAN] = Setting(plan=self._plan())
        if any(one.remedy == CHANNELS_LAST for one in self.found):
            settings[CHANNELS_LAST] = Setting(CHANNELS_LAST)
        times = timer.times(settings)
        if _TORCH not in times:
            return False
        self.step_ns = times[_TORCH].step_ns
        for problem in self.scan.own_ns:
            own_ns = self._call_ns(times[_TORCH], problem)
            # What this step does not compute keeps its time.
            self.scan.own_ns[problem] = own_ns or self.scan.own_ns[problem]
        self.found = list(_that_pay(self._in_steps(one, times) for one in self.found))
        return True

    def _plan(self) -> Plan:
        place = (self._backend.device(), self._backend.software(), self._backend.conditions())
        kernels = self.scan.kernels(self._layers, self.found)
        return Plan(kernels, *place, Config(), self._backend.name)

    def _in_steps(self, cliff: Cliff, times: Mapping[str, StepTimes]) -> Cliff:
        """A cliff with its times in steps; its remedy takes as long if the step fails with it."""
        if cliff.split is None and cliff.remedy != CHANNELS_LAST:
            # A step in another dtype would be one of another model.
            return cliff
        time_ns = self.scan.own_ns[cliff.problem]
        name = CHANNELS_LAST if cliff.split is None else _PLAN
        remedied_ns = time_ns
        if name in times:
            last = replace(cliff.problem, layout="nhwc")
            # A layer whose input is not in that layout is computed as before.
            wanted = [last, cliff.problem] if name == CHANNELS_LAST else [cliff.problem]
            taken = (self._call_ns(times[name], one, len(cliff.layers)) for one in wanted)
            remedied_ns = next((ns for ns in taken if ns), time_ns)
        return replace(cliff, time_ns=time_ns, remedied_ns=remedied_ns)

    def _call_ns(self, times: StepTimes, problem: Problem, calls: int = 0) -> int:
        """Time of one call, the mean of all in a step; 0 if there was none."""
        return times.kernels_ns.get(problem, 0) // (calls or len(self._layers[problem]))

    def add_allocator_cliffs(self, timer: StepTimer | None) -> None:
        """Add convolutions with blocks that malloc gave back, now that it keeps them."""
        sizes = self.scan.own_bytes.items()
        large = [p for p, size in sizes if max(size, p.result_bytes) >= GLIBC_MMAP_THRESHOLD]
        if timer is None:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self.found += _that_pay(
                    self._with_blocks(problem, self.scan.again_ns(problem)) for problem in large
                )
            return
        again = timer.times({_TORCH: Setting()}) if large else {}
        if _TORCH in again:
            self.found += _that_pay(
                self._with_blocks(problem, self._call_ns(again[_TORCH], problem))
                for problem in large
            )

    def _with_blocks(self, problem: Problem, time_ns: int | None) -> Cliff:
        """The cliff of a convolution that takes this time where malloc keeps blocks."""
        own_ns, size = self.scan.own_ns[problem], self.scan.own_bytes[problem]
        remedy = f"GLIBC_TUNABLES={LARGE_THRESHOLD_TUNABLES}"
        times = own_ns, time_ns or own_ns
        return Cliff(
            problem, self._layers[problem], "allocator threshold", remedy, *times, size, size
        )


def _that_pay(cliffs: Iterable[Cliff]) -> Iterator[Cliff]:
    return (one for one in cliffs if one.remedied_ns * LEAST_RATIO <= one.time_ns)
