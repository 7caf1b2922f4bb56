"""Plans: the split of every batch of every kernel, as a frozen value that can be saved."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from msgspec import ValidationError, convert, to_builtins

from ucudnn.config import Config, check_environment
from ucudnn.errors import PlanError, PlanFileError, UcudnnError, quoted, shortened
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.outcomes import (
    Comparison,
    Compilation,
    LayoutRace,
    MemoryFormat,
    Origin,
    StepMemory,
    StepRace,
)
from ucudnn.problem import Problem
from ucudnn.segment import (
    UNCOMPILED,
    Compiled,
    MicroBatch,
    Segment,
    StepDivision,
    is_size,
    micro_batches,
)
from ucudnn.split import BY_BATCH, BY_SLABS, DEFAULT_ALGORITHM, Chunk, KernelPlan, Split, Timing
from ucudnn.system.files import parse_json, write
from ucudnn.system.processes import cached_property
from ucudnn.units import Positive, format_bytes, tightest

__all__ = [
    "BY_BATCH",
    "BY_SLABS",
    "DEFAULT_ALGORITHM",
    "Chunk",
    "KernelPlan",
    "Plan",
    "Segment",
    "Split",
    "Timing",
]
_FORMAT = "ucudnn-plan"
_VERSION = 5


@dataclass(frozen=True, repr=False)
class Plan:
    """The split of every batch of every kernel, with the device, versions and settings of tuning.

    >>> plan = Plan((), Device("cpu", "any"), Software("2.13"), Conditions(), Config())
    >>> len(plan.hash), plan.workspace_bytes
    (64, 0)

    Args:
        kernels: the splits of each distinct problem.
        device: the hardware on which the kernels were measured.
        software: versions of torch and of the libraries under it.
        conditions: threads, allocator and the like during the measurements.
        config: the settings with which the plan was made.
        backend: name of the backend that runs the plan.
        step_race: race of whole training steps with the plan and without it; None if the plan was
            made without a model.
        memory_format: layout for which the plan was made: "keep" (the layout that the model had) or
            "channels_last" (channels_last_3d for 5-D tensors).
        layout_race: how the memory format was decided, or what the settings give away that keep it;
            None if they keep it and channels_last would change nothing, or no steps can be run.
        memory: memory of a whole step; None if there was no memory budget.
        origin: how the plan came about; None if the plan was put together by hand.
        compilation: how steps of a compiled model were compiled before they judged the plan; None
            if the model was not compiled, or if no steps were run.
        segments: modules that run in micro-batches or are recomputed; a segment inside another
            segment runs in each micro-batch of the outer segment.
        micro_batch: samples that a training loop should run at once; None: the whole batch.
        compiled: the model is compiled as a whole, and keeps this share of the activations that
            torch.compile would keep; "no": it is not compiled, even if its user compiles it; None:
            it runs as it is.
        comparison: how near a step by the plan is to the step by torch; None if the plan divides no
            step.
        reasons: modules that run as a whole, or are not recomputed, as (name, reason).

    Raises:
        PlanError: a module is a segment twice, a micro-batch is not an int of at least 1, or a
            share is none.
    """

    kernels: tuple[KernelPlan, ...]
    device: Device
    software: Software
    conditions: Conditions
    config: Config
    backend: str = "torch_cpu"
    step_race: StepRace | None = field(default=None, compare=False)
    memory_format: MemoryFormat = "keep"
    layout_race: LayoutRace | None = field(default=None, compare=False)
    memory: StepMemory | None = field(default=None, compare=False)
    origin: Origin | None = field(default=None, compare=False)
    compilation: Compilation | None = field(default=None, compare=False)
    segments: tuple[Segment, ...] = ()
    micro_batch: Positive | None = None
    compiled: Compiled | None = None
    comparison: Comparison | None = field(default=None, compare=False)
    reasons: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.micro_batch is not None and not is_size(self.micro_batch):
            raise PlanError(
                f"micro_batch must be an int of at least 1, or None for the whole batch, got "
                f"{quoted(self.micro_batch)}"
            )
        share = self.compiled
        if share not in (None, UNCOMPILED) and not (type(share) is float and 0 <= share <= 1):
            raise PlanError(
                f"compiled must be a share of the activations from 0.0 to 1.0, 'no', or None, got "
                f"{quoted(share)}"
            )
        names = [one.module for one in self.segments]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise PlanError(
                f"a module can be a segment once, got {twice} more often; leave one out"
            )

    @property
    def division(self) -> StepDivision:
        """How a step by this plan is divided and compiled."""
        return StepDivision(self.segments, self.micro_batch, self.compiled)

    @property
    def compiles(self) -> bool:
        """True if the model is compiled by this plan."""
        return isinstance(self.compiled, float)

    def micro_batches(self, *batch: Any) -> Iterator[MicroBatch]:
        """Cut a batch into micro-batches for a training loop, along the first axis of its tensors.

        >>> plan = Plan((), Device("cpu", ""), Software(""), Conditions(), Config(), micro_batch=2)
        >>> for images, labels in plan.micro_batches(["a", "b", "c"], [0, 1, 2]):
        ...     print(images, labels)
        ['a', 'b'] [0, 1]
        ['c'] [2]

        The `weight` of a part is the fraction of the batch's samples that it has. If the loss is a
        mean over samples, `(loss(model(part[0]), part[1]) * part.weight).backward()` for all parts
        together computes the gradients of the whole batch.

        Args:
            batch: tensors, arrays, lists of samples, and tuples and mappings of these.

        Raises:
            ConfigError: the batch is empty, or its tensors differ in their number of samples.
        """
        return micro_batches(self.micro_batch, batch)

    def __repr__(self) -> str:
        # The generated `repr` would print every table of every kernel.
        return f"<Plan {self.hash[:8]}: {self}>"

    def __str__(self) -> str:
        changed = sum(not kernel.is_default for kernel in self.kernels)
        partial = f", {len(self.left_out)} left out" if self.left_out else ""
        return (
            f"{len(self.kernels)} kernels{partial}, {changed} not torch's own, up to "
            f"{format_bytes(self.workspace_bytes)} of workspace, for {self.device}"
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Kernels without a plan for some or all batches, because of the time budget or a limit."""
        return () if self.origin is None else (*self.origin.left_out, *self.origin.over_limit)

    def split(self, problem: Problem) -> Split:
        """The split of a problem at its batch, which may be any batch up to the planned one.

        Raises:
            PlanError: the problem is not in the plan, is in it only with smaller batches, or has no
                split for its batch.
        """
        return self.kernel(problem).split(problem.batch)

    def kernel(self, problem: Problem) -> KernelPlan:
        """The kernel that covers a problem; if several do, the one with the smallest batch.

        If kernels of this geometry and at least this batch exist, but none has a split of the
        batch, the largest is returned; its method `split` raises the error.

        Raises:
            PlanError: no kernel of the plan has this geometry and at least this batch.
        """
        kernels = self._kernels_by_geometry.get(problem.with_batch(1), [])
        # The kernels are sorted by batch, so the first one that covers the problem is the smallest.
        for kernel in kernels:
            if kernel.covers(problem.batch):
                return kernel
        if kernels and problem.batch <= kernels[-1].problem.batch:
            return kernels[-1]  # its `split` raises an error that says why the batch has no plan
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
        """True if the plan has a split of this problem."""
        kernels = self._kernels_by_geometry.get(problem.with_batch(1), [])
        return any(kernel.covers(problem.batch) for kernel in kernels)

    @cached_property
    def _kernels_by_geometry(self) -> dict[Problem, list[KernelPlan]]:
        # The batch is not part of the geometry, so every key has batch 1.
        by_geometry: dict[Problem, list[KernelPlan]] = {}
        for kernel in sorted(self.kernels, key=lambda kernel: kernel.problem.batch):
            by_geometry.setdefault(kernel.problem.with_batch(1), []).append(kernel)
        return by_geometry

    def limit_bytes(self, kernel: KernelPlan) -> int | None:
        """Most workspace in bytes that one call of a kernel may use; None for no limit.

        It is the smallest of these: the workspace limit; what the kernel's live memory leaves of
        the memory budget; and of a pool the part that the plan gives to the call, with an equal
        share, among the calls of this kernel, of what the plan leaves of the pool.
        """
        left = part = None
        if self.memory is not None and kernel.live_bytes is not None:
            left = max(0, self.memory.budget_bytes - kernel.live_bytes)
        if self.config.total_bytes is not None:
            unused = self.config.total_bytes - self.workspace_bytes
            part = kernel.timing.workspace_bytes + unused // len(kernel.layers)
        return tightest(self.config.limit_bytes, left, part)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that calls need: the most of any call; with a pool, the sum of all."""
        if self.config.total_bytes is not None:
            return sum(one.timing.workspace_bytes * len(one.layers) for one in self.kernels)
        return max((kernel.timing.workspace_bytes for kernel in self.kernels), default=0)

    @property
    def predicted_time_ns(self) -> int:
        """Sum of the predicted times of all calls of all kernels."""
        return sum(kernel.predicted_time_ns * len(kernel.layers) for kernel in self.kernels)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of what the plan decides, its settings and its device; equal for equal plans.

        Times, dates, versions and conditions are left out, so that plans with the same splits from
        two machines of one kind have equal hashes.
        """
        # The kernels are sorted, because their order must not change the hash.
        decisions = {
            "kernels": sorted(_canonical(kernel.decisions()) for kernel in self.kernels),
            "config": self.config.to_dict(),
            "device": asdict(self.device),
            "memory_format": self.memory_format,
            "segments": to_builtins(self.segments),
            "micro_batch": self.micro_batch,
            "compiled": self.compiled,
        }
        return _sha256_of(decisions)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file; readers see the old file or the new one, never a part.

        Raises:
            OutputError: the file cannot be written.
        """
        write(path, f"{_in_lines(self.to_dict())}\n".encode(), "the plan")

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values, as `save` writes it."""
        values = {name: one for name, one in to_builtins(self).items() if one is not None}
        document = {
            **values,
            "format": _FORMAT,
            "version": _VERSION,
            "hash": self.hash,
            "config": self.config.to_dict(),
        }
        # Unlike the hash, the checksum also covers times and names, so that any damage of the file
        # is found.
        return {**document, "checksum": _sha256_of(document)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a JSON file.

        Raises:
            PlanFileError: the file cannot be read, is no plan, is damaged, or has another version.
            ConfigError: an environment variable is refused; the file may be fine.
        """
        # The environment is checked first, because a variable that is refused must not be reported
        # as damage of the file.
        check_environment()
        document = _read_document(path)
        try:
            # The settings are built from the file alone, so that no variable of the environment
            # replaces a field.
            config = Config.from_dict(document["config"])
            plan = convert({**document, "config": config}, cls)
            # Comparing everything finds more than comparing the checksums: a field that the file
            # lacks and that has a default, and a field that plans do not have.
            if _canonical(plan.to_dict()) != _canonical(document):
                raise PlanError("its checksum does not agree with its contents")
        # A file that was cut or edited may raise any of these while its values are built.
        except (KeyError, TypeError, ValueError, ValidationError, UcudnnError) as error:
            detail = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise PlanFileError(
                f"{path} is a damaged plan: {shortened(detail)}; make it anew"
            ) from error
        return plan


def _read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON document of a plan's file; raises PlanFileError if it is no plan of this version."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlanFileError(f"cannot read the plan {path}: {reason}") from error
    try:
        document = parse_json(text)
    except ValueError as error:
        raise PlanFileError(f"{path} is not a plan: it is not valid JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise PlanFileError(f"{path} is not a plan: it has no field format={_FORMAT!r}")
    version = document.get("version")
    if version != _VERSION:
        raise PlanFileError(
            f"{path} is a plan of format version {shortened(repr(version))}, this ucudnn reads "
            f"{_VERSION}; make it anew with `ucudnn tune` or use the ucudnn that wrote it"
        )
    return document


def _sha256_of(value: Any) -> str:
    """SHA-256 of a JSON value, as hexadecimal digits."""
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def _canonical(value: Any) -> str:
    """Canonical JSON text; hash and checksum rely on it, because equal values have equal texts.

    >>> _canonical({"b": 1, "a": [2, 3]})
    '{"a":[2,3],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _in_lines(document: Mapping[str, Any]) -> str:
    """Canonical JSON text with a line for each field and each kernel, so that diffs are readable.

    >>> print(_in_lines({"version": 1, "kernels": [{"b": 1, "a": 2}, {"a": 3}]}))
    {"kernels":[
    {"a":2,"b":1},
    {"a":3}],
    "version":1}
    """
    fields = []
    for name, value in sorted(document.items()):
        text = _canonical(value)
        if name == "kernels":
            text = "[\n" + ",\n".join(map(_canonical, value)) + "]"
        fields.append(f"{_canonical(name)}:{text}")
    return "{" + ",\n".join(fields) + "}"
