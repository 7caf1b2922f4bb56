"""Plans: the split of every batch of every kernel, as a frozen value that can be saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ucudnn.config import Config, check_environment
from ucudnn.errors import PlanError
from ucudnn.measurement import Conditions, Device, Origin, Software
from ucudnn.problem import Problem
from ucudnn.races import (
    MEMORY_FORMATS,
    Curve,
    LayoutHint,
    LayoutRace,
    StepMemory,
    StepRace,
)
from ucudnn.slabs import row_count
from ucudnn.split import DEFAULT_ALGORITHM, Split, Step, Timing
from ucudnn.system import documents
from ucudnn.system.files import write
from ucudnn.system.forking import cached_property
from ucudnn.system.markup import html_table
from ucudnn.units import format_bytes

__all__ = ["DEFAULT_ALGORITHM", "KernelPlan", "Plan", "Split", "Step", "Timing"]

# In `KernelPlan.alone`: what computes a batch if no algorithm does alone.
BY_BATCH, BY_SLABS = -1, -2
# Also the note by which alone plan files of ucudnn before 0.1.0 tell what `is_perturbed` is.
_PERTURBED = "timed while others used the processors"
# Fields of a plan that only say what whole steps showed; the hash leaves them out.
_OUTCOMES: dict[str, type[StepRace | LayoutRace | LayoutHint | StepMemory | Curve | Origin]] = {
    "step_race": StepRace,
    "layout_race": LayoutRace,
    "layout_hint": LayoutHint,
    "memory": StepMemory,
    "curve": Curve,
    "origin": Origin,
}


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The splits of one kernel for every batch n from 1 to `problem.batch`.

    A batch is computed undivided, by slabs, or by steps along the batch. Then the last step of
    batch n is in `last[n - 1]`; the steps before it are those of batch n - size, and so on to 0.

    Args:
        problem: the kernel at the largest planned batch N.
        layers: names of the layers that run it, one per call.
        algorithms: names that `alone` and `last` point into.
        alone: for n = 1..N the index of the algorithm that computes n undivided; -1: split it
            along the batch, -2: by slabs.
        last: for n = 1..N the (size, algorithm index) of the last step of a split of n whose first
            chunk may be all of it; size 0 if there is none.
        predicted_time_ns: sum over the steps of the plan of N.
        timing: of the plan of N as a whole call; predicted if the device was not there.
        default: torch's own convolution at N, measured in the same rounds; None if torch cannot
            compute the problem, or if a recording has no such measurement.
        notes: such as "default kernel=onednn".
        slabs: (rows, algorithm index) of each slab; the same for every batch that is split by
            slabs.
        is_perturbed: whether others used the processors while it was timed.
        micro_batch: samples that every chunk of a batch-invariant kernel is computed as, else 0.
        free: fastest split without that demand in the same race; None if there was none.
        default_is_deterministic: whether torch's own convolution computes the same bits each time.
        live_bytes: the most that a step has allocated beside the workspace of any call of it; None
            if there was no memory budget.
        slab_samples: samples of each micro-batch that slabs divide; 0: slabs have all samples.

    Raises:
        PlanError: the fields do not describe a split of every batch.
    """

    problem: Problem
    layers: tuple[str, ...]
    algorithms: tuple[str, ...]
    alone: tuple[int, ...]
    last: tuple[tuple[int, int], ...]
    predicted_time_ns: int
    timing: Timing
    default: Timing | None
    notes: tuple[str, ...] = ()
    slabs: tuple[tuple[int, int], ...] = ()
    is_perturbed: bool = False
    micro_batch: int = 0
    free: Timing | None = None
    default_is_deterministic: bool = True
    live_bytes: int | None = None
    slab_samples: int = 0

    def __post_init__(self) -> None:
        self._require_types()
        # Slabs are part of the hash, so they must be right even if no batch uses them.
        if self.slabs or BY_SLABS in self.alone or self.slab_samples:
            extents = self.problem.batch, row_count(self.problem)
            more = self.slabs, self.slab_samples, range(len(self.algorithms))
            documents.require_slabs(self.problem, extents, *more)
        self._require_invariant()
        if not len(self.alone) == len(self.last) == self.problem.batch:
            raise PlanError(
                f"the plan of {self.problem} must have one entry per batch "
                f"({self.problem.batch}), got {len(self.alone)} and {len(self.last)}"
            )
        documents.require_chains(
            self.problem, self.alone, self.last, range(BY_SLABS, len(self.algorithms))
        )
        # Smaller batches may lack a split within the limit; the planned one may not.
        if not self.covers(self.problem.batch):
            raise PlanError(f"the plan of {self.problem} has no valid split of its own batch")

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and that the times were perturbed where they were."""
        return (*self.notes, _PERTURBED) if self.is_perturbed else self.notes

    def _require_types(self) -> None:
        # Plan files hold what anybody wrote, so types are checked before anything is compared.
        for name in ("predicted_time_ns", "micro_batch", "slab_samples"):
            documents.require_count(name, getattr(self, name))
        if self.live_bytes is not None:
            documents.require_count("live_bytes", self.live_bytes)
        for name in ("layers", "algorithms", "notes"):
            documents.require_strings(name, getattr(self, name))
        for name, rows in (("alone", (self.alone,)), ("last", self.last), ("slabs", self.slabs)):
            documents.require_ints(name, rows)
        for name in ("is_perturbed", "default_is_deterministic"):
            documents.require_bool(name, getattr(self, name))

    def _require_invariant(self) -> None:
        if not self.micro_batch:
            return
        expected = {BY_BATCH}, documents.invariant_steps(self.problem.batch, self.micro_batch)
        if self.micro_batch > self.problem.batch or (set(self.alone), self.last) != expected:
            raise PlanError(
                f"the plan of {self.problem} must compute every batch in chunks of "
                f"{self.micro_batch} by one algorithm, because it is batch-invariant"
            )

    def split(self, batch: int) -> Split:
        """The steps for a batch from 1 to `problem.batch`.

        Raises:
            PlanError: the batch is outside that range.
        """
        if not 1 <= batch <= self.problem.batch:
            raise PlanError(
                f"{self.problem} is planned for batches 1 to {self.problem.batch}, got {batch}; "
                f"tune with a larger example input"
            )
        if not self.covers(batch):
            raise PlanError(
                f"{self.problem} has no plan for batch {batch} within its workspace limit, though "
                f"for larger ones: torch computes them by another kernel; raise the limit"
            )
        index = self.alone[batch - 1]
        if index >= 0:
            return Split("batch", (Step(batch, self.algorithms[index]),))
        if index == BY_SLABS:
            rows = tuple(Step(size, self.algorithms[index]) for size, index in self.slabs)
            # A batch of no more samples than a micro-batch is one.
            samples = self.slab_samples if self.slab_samples < batch else 0
            return Split("spatial", rows, samples=samples)
        # `last` gives the final step first, so the walk runs backwards.
        steps = []
        while batch:
            size, index = self.last[batch - 1]
            steps.append(Step(size, self.algorithms[index]))
            batch -= size
        return Split("batch", tuple(reversed(steps)), self.micro_batch)

    def by_default(self, every_batch: bool) -> KernelPlan:
        """The same kernel with torch's own undivided convolution, which must have been measured.

        Args:
            every_batch: True: smaller batches, too; False: smaller batches keep their splits.
        """
        assert self.default is not None
        # Appended, because the splits of smaller batches refer to the others by index.
        algorithms = (*self.algorithms, DEFAULT_ALGORITHM)
        index = len(self.algorithms)
        # Slabs that no batch uses any more must not stay in the hash.
        has_slabs = not every_batch and BY_SLABS in self.alone[:-1]
        return replace(
            self,
            algorithms=(DEFAULT_ALGORITHM,) if every_batch else algorithms,
            alone=(0,) * self.problem.batch if every_batch else (*self.alone[:-1], index),
            last=((0, -1),) * self.problem.batch if every_batch else self.last,
            slabs=self.slabs if has_slabs else (),
            slab_samples=self.slab_samples if has_slabs else 0,
            timing=self.default,
            predicted_time_ns=self.default.time_ns,
        )

    def decisions(self) -> list[Any]:
        """The problem and its splits, with algorithms by name, as JSON values."""
        names = {BY_BATCH: None, BY_SLABS: BY_SLABS, **dict(enumerate(self.algorithms))}
        # Names and not indices: the order of `algorithms` decides nothing.
        alone = [names[index] for index in self.alone]
        last = [[size, self.algorithms[index]] if size else None for size, index in self.last]
        slabs = [[size, self.algorithms[index]] for size, index in self.slabs]
        # without slabs the hash is that of a file of version 1
        more = (slabs, self.micro_batch, self.slab_samples and {"slab_samples": self.slab_samples})
        return [self.problem.to_dict(), alone, last, *filter(None, more)]

    def to_dict(self) -> dict[str, Any]:
        """The kernel as JSON values."""
        values: dict[str, Any] = {name: getattr(self, name) for name in KernelPlan.__slots__}
        for name in ("timing", "default", "free"):
            values[name] = asdict(values[name]) if values[name] else None
        # Plans without a memory budget have the same file as before there was any.
        if self.live_bytes is None:
            del values["live_bytes"]
        # Versions before 4 have none of these, those before 5 no nested splits.
        if not self.micro_batch:
            del values["micro_batch"], values["free"]
        if not self.slab_samples:
            del values["slab_samples"]
        return {**values, "problem": self.problem.to_dict()}

    def covers(self, batch: int) -> bool:
        """True if there is a split of this batch: nearly always for 1 to `problem.batch`."""
        if not 1 <= batch <= self.problem.batch:
            return False
        return self.alone[batch - 1] != BY_BATCH or self.last[batch - 1][0] > 0

    def is_derived(self, batch: int) -> bool:
        """True if the split of this batch is composed of parts and was not timed as a whole."""
        return batch != self.problem.batch or self.timing.is_predicted

    @property
    def is_default(self) -> bool:
        """True if the plan of the largest batch is torch's own undivided convolution."""
        return self.split(self.problem.batch).is_default


@dataclass(frozen=True, repr=False)
class Plan:
    """The split of every batch of every kernel of a model, with its device, versions and settings.

    >>> plan = Plan((), Device("cpu", "any"), Software("2.13"), Conditions(), Config())
    >>> len(plan.hash), plan.workspace_bytes
    (64, 0)

    Args:
        kernels: one per distinct problem.
        device: the hardware it was measured on.
        software: the versions.
        conditions: threads, allocator and so on.
        config: the settings it was made with.
        backend: name of the backend that runs it.
        step_race: race of whole training steps with the plan and without it; None if the plan was
            made without a model.
        memory_format: layout of the model that it was made for: "keep", as the model was, or
            "channels_last" (channels_last_3d for 5-D tensors).
        layout_race: how the memory format was decided; None if the settings did not ask for it.
        layout_hint: gain to expect of channels_last, if the settings did not ask for it; None if it
            would change nothing, or if no steps were run.
        memory: memory of a whole step; None if there was no memory budget.
        curve: time over memory of the network; None if the settings did not ask for it.
        origin: how it came about; None in files of versions that did not note it.

    Raises:
        PlanError: the name of the backend is no string, or there is no such memory format.
    """

    kernels: tuple[KernelPlan, ...]
    device: Device
    software: Software
    conditions: Conditions
    config: Config
    backend: str = "torch_cpu"
    step_race: StepRace | None = field(default=None, compare=False)
    memory_format: str = "keep"
    layout_race: LayoutRace | None = field(default=None, compare=False)
    layout_hint: LayoutHint | None = field(default=None, compare=False)
    memory: StepMemory | None = field(default=None, compare=False)
    curve: Curve | None = field(default=None, compare=False)
    origin: Origin | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        documents.require_strings("backend", (self.backend,))
        if self.memory_format not in MEMORY_FORMATS:
            raise PlanError(
                f"memory_format must be one of {', '.join(MEMORY_FORMATS)}, "
                f"got {self.memory_format!r}"
            )

    def __repr__(self) -> str:
        # The generated one would print every table of every kernel.
        return f"<Plan {self.hash[:8]}: {self}>"

    def __str__(self) -> str:
        changed = sum(not kernel.is_default for kernel in self.kernels)
        partial = f", {len(self.left_out)} left out" if self.left_out else ""
        return (
            f"{len(self.kernels)} kernels{partial}, {changed} not torch's own, up to "
            f"{format_bytes(self.workspace_bytes)} of workspace, for {self.device}"
        )

    def _repr_html_(self) -> str:
        """A table of the kernels, for notebooks."""
        rows = [
            (str(kernel.problem), ", ".join(kernel.layers), str(kernel.split(kernel.problem.batch)))
            for kernel in self.kernels
        ]
        return html_table(repr(self), ("kernel", "layers", "split"), rows)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Kernels that the plan lacks: the time was over, or nothing fits the workspace limit."""
        return () if self.origin is None else (*self.origin.left_out, *self.origin.over_limit)

    def split(self, problem: Problem) -> Split:
        """The split of a problem at its batch, which may be any batch up to the planned one.

        Raises:
            PlanError: the problem is not in the plan, or only with smaller batches.
        """
        return self.kernel(problem).split(problem.batch)

    def kernel(self, problem: Problem) -> KernelPlan:
        """The kernel that covers a problem: same geometry, and the smallest sufficient batch.

        Raises:
            PlanError: there is none.
        """
        kernels = self._kernels_by_geometry.get(problem.with_batch(1), [])
        # In order of their batches, so the first one that covers it is the smallest.
        for kernel in kernels:
            if kernel.covers(problem.batch):
                return kernel
        if kernels and problem.batch <= kernels[-1].problem.batch:
            return kernels[-1]  # whose `split` says why it has none of this batch
        if kernels:
            raise PlanError(
                f"{problem} is planned only up to batch {kernels[-1].problem.batch}; "
                f"tune with a larger example input or set unplanned='torch'"
            )
        raise PlanError(
            f"{problem} is not among the {len(self.kernels)} kernels of this plan; "
            f"tune with this shape or set unplanned='torch'"
        )

    def covers(self, problem: Problem) -> bool:
        """True if `split` has an answer for this problem."""
        kernels = self._kernels_by_geometry.get(problem.with_batch(1), [])
        return any(kernel.covers(problem.batch) for kernel in kernels)

    @cached_property
    def _kernels_by_geometry(self) -> dict[Problem, list[KernelPlan]]:
        # The batch is not part of the geometry: one of 1 stands for all.
        by_geometry: dict[Problem, list[KernelPlan]] = {}
        for kernel in sorted(self.kernels, key=lambda kernel: kernel.problem.batch):
            by_geometry.setdefault(kernel.problem.with_batch(1), []).append(kernel)
        return by_geometry

    def limit_bytes(self, kernel: KernelPlan) -> int | None:
        """Workspace that a call of a kernel may use: the limit, or what the budget leaves it."""
        limit = self.config.limit_bytes
        if self.memory is None or kernel.live_bytes is None:
            return limit
        left = max(0, self.memory.budget_bytes - kernel.live_bytes)
        return left if limit is None else min(left, limit)

    @property
    def workspace_bytes(self) -> int:
        """Workspace of the plan: the largest of any kernel; with a pool, the sum over all calls."""
        if self.config.total_bytes is not None:
            return sum(one.timing.workspace_bytes * len(one.layers) for one in self.kernels)
        return max((kernel.timing.workspace_bytes for kernel in self.kernels), default=0)

    @property
    def predicted_time_ns(self) -> int:
        """Sum of the predicted times of all calls of all kernels."""
        return sum(kernel.predicted_time_ns * len(kernel.layers) for kernel in self.kernels)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the problems, splits, layout, settings and device; equal for equal plans.

        Times, dates and hosts are left out, so that it can be equal on two machines of one kind.
        """
        # Without software and conditions, and in any order of kernels: two machines of one kind
        # that decide alike have equal hashes.
        decisions = {
            "kernels": sorted(documents.canonical(kernel.decisions()) for kernel in self.kernels),
            "config": self.config.to_dict(),
            "device": asdict(self.device),
            **self._layout_to_dict(),
        }
        return documents.sha256_of(decisions)

    def _layout_to_dict(self) -> dict[str, str]:
        """The memory format; empty if the model keeps its own, as before version 3."""
        return {} if self.memory_format == "keep" else {"memory_format": self.memory_format}

    @property
    def _version(self) -> int:
        for version, name in ((5, "slab_samples"), (4, "micro_batch")):
            if any(getattr(kernel, name) for kernel in self.kernels):
                return version
        if self.memory_format != "keep":
            return 3
        return 2 if any(kernel.slabs for kernel in self.kernels) else 1

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file; readers see the old file or the new one, never a part.

        Raises:
            OutputError: the file cannot be written.
        """
        write(path, f"{documents.canonical(self.to_dict())}\n".encode(), "the plan")

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values, as `save` writes it."""
        document: dict[str, Any] = {
            "format": documents.FORMAT,
            "version": self._version,
            **self._layout_to_dict(),
            "hash": self.hash,
            "backend": self.backend,
            "config": self.config.to_dict(),
            "device": asdict(self.device),
            "software": asdict(self.software),
            "conditions": asdict(self.conditions),
            "kernels": [kernel.to_dict() for kernel in self.kernels],
        }
        for name in _OUTCOMES:
            if getattr(self, name) is not None:
                document[name] = getattr(self, name).to_dict()
        # Unlike the hash it covers times and names, so that any damage shows.
        return {**document, "checksum": documents.sha256_of(document)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a JSON file.

        Raises:
            PlanFileError: it cannot be read, is not a plan, is damaged, or is of a later version.
            ConfigError: an environment variable is refused; the file may be fine.
        """
        # First: a refused variable must not be reported as damage of the file.
        check_environment()
        document = documents.read_document(path)
        with documents.damage_named(path):
            return cls.from_dict(document)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Plan:
        """Build a plan from the JSON values of `to_dict`.

        Raises:
            PlanError: the values are not those of a plan.
        """
        documents.require_checksum(document)
        outcomes: dict[str, Any] = {
            name: kind.from_dict(document[name])
            for name, kind in _OUTCOMES.items()
            if document.get(name) is not None
        }
        return cls(
            kernels=tuple(_kernel(fields) for fields in document["kernels"]),
            device=Device(**document["device"]),
            software=Software(**document["software"]),
            conditions=Conditions(**document["conditions"]),
            config=Config.from_dict(document["config"]),
            backend=document["backend"],
            memory_format=document.get("memory_format", "keep"),  # versions before 3 have none
            **outcomes,
        )


def _kernel(fields: Mapping[str, Any]) -> KernelPlan:
    notes = documents.strings_in(fields["notes"])
    return KernelPlan(
        problem=Problem.from_dict(fields["problem"]),
        layers=documents.strings_in(fields["layers"]),
        algorithms=documents.strings_in(fields["algorithms"]),
        alone=tuple(fields["alone"]),
        last=documents.pairs_in(fields["last"]),
        predicted_time_ns=fields["predicted_time_ns"],
        timing=Timing(**fields["timing"]),
        default=Timing(**fields["default"]) if fields["default"] else None,
        notes=tuple(note for note in notes if note != _PERTURBED),
        slabs=documents.pairs_in(fields.get("slabs", ())),  # version 1 may have none
        is_perturbed=fields.get("is_perturbed", _PERTURBED in notes),
        micro_batch=fields.get("micro_batch", 0),
        free=Timing(**fields["free"]) if fields.get("free") else None,
        default_is_deterministic=fields.get("default_is_deterministic", True),
        live_bytes=fields.get("live_bytes"),  # only with a memory budget
        slab_samples=fields.get("slab_samples", 0),  # versions before 5 have none
    )
