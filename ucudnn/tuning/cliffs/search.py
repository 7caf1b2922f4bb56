"""Find the cliffs of a step: scan its convolutions alone, then time what was found in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
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
from ucudnn.races import StepTimes
from ucudnn.tuning.cliffs.found import CHANNELS_LAST, MALLOC, SPLITS, TORCH, Cliff, Cliffs
from ucudnn.tuning.cliffs.scan import LEAST_RATIO, Scan
from ucudnn.tuning.cliffs.step_times import Setting

_MOST_S = 120.0
# Of a step; what saves less is within the noise of most machines.
_LEAST_SHARE = 0.002

OnKernel = Callable[[int, int], None]
# Times of steps in some settings; instead of times, the reason why the step fails.
TimeSteps = Callable[[Mapping[str, Setting]], Mapping[str, StepTimes | str]]


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
    time_steps: TimeSteps | None = None,
) -> Cliffs:
    """Scan the convolutions of a step, the largest first, for two minutes at most.

    Args:
        layers: names of the layers of each distinct problem.
        backend: of the device.
        keep_blocks: lets malloc keep large blocks, such as `large_blocks_stay`, and says whether it
            could; torch's own convolutions with large blocks are then timed once more. None: leave
            malloc as it is.
        on_kernel: called after every kernel, with how many are done and how many there are.
        time_steps: computes steps of the model in several settings, in turn. Cliffs then have the
            times in steps, and `keep_blocks` is called only if the step fails. None: they have the
            times of the scan.
    """
    search = _Search(layers, backend)
    search.scan_all(on_kernel)
    is_timed = time_steps is not None and search.time_in_steps(time_steps)
    # Last, because times before and after it cannot be compared with each other.
    if not is_timed and keep_blocks is not None and keep_blocks():
        search.add_allocator_cliffs()
    found = sorted(search.found, key=lambda cliff: -cliff.saved_ns)
    listed = [one for one in found if one.saved_ns >= _LEAST_SHARE * search.step_ns]
    return Cliffs(
        tuple(listed),
        backend.device(),
        convolutions_ns=sum(ns * len(layers[p]) for p, ns in search.own_ns.items()),
        scanned=len(search.own_ns),
        total=len(layers),
        is_perturbed=search.is_perturbed,
        plan=search.plan(listed),
        steps_ns=search.steps_ns,
        failures=search.failures,
        unlisted=len(found) - len(listed),
    )


class _Search:
    """Cliffs of a step, as far as they are known.

    Attributes:
        found: cliffs so far.
        own_ns: time of a call of each convolution that was scanned, by torch.
        steps_ns: time of a step in each setting; empty if none was run.
        failures: reasons why the step fails, by setting.
        is_perturbed: others used the processors during the scan.

    Args:
        layers: names of the layers of each distinct problem.
        backend: of the device.
    """

    def __init__(self, layers: Mapping[Problem, tuple[str, ...]], backend: AbstractBackend) -> None:
        self.found: list[Cliff] = []
        self.own_ns: dict[Problem, int] = {}
        self.steps_ns: dict[str, int] = {}
        self.failures: dict[str, str] = {}
        self.is_perturbed = False
        self._layers = layers
        self._backend = backend
        # Those of before malloc is changed.
        self._conditions = backend.conditions()
        self._scan = Scan(backend, monotonic() + _MOST_S)
        # As the scan found them.
        self._alone: list[Cliff] = []

    @property
    def step_ns(self) -> int:
        """Time of a step by torch; 0 if none was run."""
        return self.steps_ns.get(TORCH, 0)

    def scan_all(self, on_kernel: OnKernel) -> None:
        """Time each convolution alone, and what could replace it."""
        # Load is what others used since it was last asked for.
        self._backend.state()
        # Function modes of the caller would change where operands are allocated.
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for problem in sorted(self._layers, key=lambda p: -p.flops * len(self._layers[p])):
                self._alone += self._scan.cliffs(problem, self._layers[problem])
                self.is_perturbed |= self._backend.state().load > 0
                on_kernel(len(self._scan.own_ns), len(self._layers))
        self._scan.release()
        self.found, self.own_ns = list(self._alone), dict(self._scan.own_ns)

    def plan(self, listed: Iterable[Cliff]) -> Plan | None:
        """Plan of all scanned kernels, by the splits of some cliffs and else by torch.

        Its times are those of kernels alone, as in any plan. None if nothing was scanned.
        """
        wanted = {cliff.problem for cliff in listed if cliff.split is not None}
        alone = [cliff for cliff in self._alone if cliff.problem in wanted]
        kernels, backend = self._scan.kernels(self._layers, alone), self._backend
        place = (backend.device(), backend.software(), self._conditions)
        return Plan(kernels, *place, Config(), backend.name) if kernels else None

    def time_in_steps(self, time_steps: TimeSteps) -> bool:
        """Replace the times by those in whole steps; False if the step fails."""
        found = time_steps(self._settings())
        times = {name: one for name, one in found.items() if isinstance(one, StepTimes)}
        self.failures = {name: one for name, one in found.items() if isinstance(one, str)}
        if TORCH not in times:
            return False
        self.steps_ns = {name: one.step_ns for name, one in times.items()}
        for problem in self.own_ns:
            own_ns = self._call_ns(times[TORCH], problem)
            # What this step does not compute keeps its time.
            self.own_ns[problem] = own_ns or self.own_ns[problem]
        again = times[MALLOC] if self._is_faster(MALLOC) else times[TORCH]
        kept = (self._with_blocks(one, self._call_ns(again, one)) for one in self._large)
        self.found = list(_that_pay([self._in_steps(one, times) for one in self._alone], kept))
        return True

    def _settings(self) -> dict[str, Setting]:
        """Torch's own step, and one for each way to apply a remedy."""
        settings = {TORCH: Setting()}
        if any(one.split is not None for one in self._alone):
            settings[SPLITS] = Setting(plan=self.plan(self._alone))
        if any(one.remedy == CHANNELS_LAST for one in self._alone):
            settings[CHANNELS_LAST] = Setting(CHANNELS_LAST)
        is_glibc = self._backend.device().type == "cpu" and describe_allocator() == "glibc"
        if self._large and is_glibc:
            settings[MALLOC] = Setting(keeps_blocks=True)
        return settings

    def _in_steps(self, cliff: Cliff, times: Mapping[str, StepTimes]) -> Cliff:
        """A cliff with its times in steps; nothing is saved where its remedy does not work."""
        name = SPLITS if cliff.split is not None else cliff.remedy
        if name not in (SPLITS, CHANNELS_LAST):
            # A step in another dtype would be one of another model: its times are of kernels alone.
            return cliff
        time_ns = remedied_ns = self.own_ns[cliff.problem]
        if name in times and (name == SPLITS or self._is_faster(name)):
            # What is another kernel there is not remedied.
            remedied_ns = self._call_ns(times[name], cliff.problem) or time_ns
        return replace(cliff, time_ns=time_ns, remedied_ns=remedied_ns)

    def _is_faster(self, setting: str) -> bool:
        """True if a setting of the whole step does not lose elsewhere what it saves."""
        return self.steps_ns.get(setting, self.step_ns) < self.step_ns

    def _call_ns(self, times: StepTimes, problem: Problem) -> int:
        """Time of one call, the mean of all in a step in whichever layout; 0 if there was none."""
        either = [problem]
        last = replace(problem, layout="nhwc") if problem.rank > 1 else problem
        # Calls that the model itself computes in that layout are a problem of their own.
        if last not in self._layers:
            either.append(last)
        total_ns = sum(times.kernels_ns.get(one, 0) for one in either)
        return total_ns // len(self._layers[problem])

    @property
    def _large(self) -> list[Problem]:
        """Convolutions with blocks that malloc would give back."""
        sizes = self._scan.own_bytes.items()
        return [p for p, size in sizes if max(size, p.result_bytes) >= GLIBC_MMAP_THRESHOLD]

    def add_allocator_cliffs(self) -> None:
        """Add convolutions with large blocks, now that malloc keeps these."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            again = [(problem, self._scan.again_ns(problem)) for problem in self._large]
        self.found += _that_pay(self._with_blocks(*one) for one in again)

    def _with_blocks(self, problem: Problem, time_ns: int | None) -> Cliff:
        """The cliff of a convolution that takes this time where malloc keeps blocks."""
        own_ns, size = self.own_ns[problem], self._scan.own_bytes[problem]
        remedy = f"GLIBC_TUNABLES={LARGE_THRESHOLD_TUNABLES}"
        times = own_ns, time_ns or own_ns
        return Cliff(
            problem, self._layers[problem], "allocator threshold", remedy, *times, size, size
        )


def _that_pay(*cliffs: Iterable[Cliff]) -> Iterator[Cliff]:
    return (one for one in chain(*cliffs) if one.remedied_ns * LEAST_RATIO <= one.time_ns)
