"""Backend that replays the measurements of a device: it lists candidates and runs nothing.

With it, a laptop can plan for a fleet of GPUs, and decisions can be tested without a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ucudnn.backends._base import AbstractBackend, Executable
from ucudnn.backends.registry import entry_for_device
from ucudnn.errors import ConfigError, UnsupportedError
from ucudnn.measurement import (
    Candidate,
    Conditions,
    Device,
    Measurement,
    Role,
    Software,
    Subject,
    role_of,
)
from ucudnn.problem import Problem
from ucudnn.split import DEFAULT_ALGORITHM

if TYPE_CHECKING:
    from torch import Tensor


class _Group(NamedTuple):
    """Fields of `MeasurementKey` that are the same in all measurements of one recording."""

    device: Device
    software: Software
    conditions: Conditions
    protocol: int

    def __str__(self) -> str:
        versions = {name: getattr(self.software, name) for name in self.software.__slots__}
        known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        return (
            f"{self.device} with {known}, {self.conditions.threads} threads, "
            f"protocol {self.protocol}"
        )


class RecordedBackend(AbstractBackend):
    """A backend whose candidates and times are those of the measurements of one device.

    If there are measurements of several devices, `device` is a part of the name of one of them. All
    measurements of this device must have the same versions and conditions.

    >>> from ucudnn.measurement import MeasurementKey
    >>> device, software = Device("cuda", "NVIDIA H200"), Software("2.13.0")
    >>> problem = Problem("fprop", 8, 4, 4, (9, 9), (3, 3))
    >>> key = MeasurementKey(problem, "eng0", device, software, Conditions(), 1)
    >>> backend = RecordedBackend([Measurement(key, "ok", 1000, workspace_bytes=0)])
    >>> backend.name, [candidate.algorithm for candidate in backend.candidates(problem)]
    ('cudnn', ['eng0'])
    """

    def __init__(self, measurements: Iterable[Measurement], device: str | None = None) -> None:
        part = (device or "").lower()
        listed = [entry for entry in measurements if part in entry.key.device.name.lower()]
        groups = {_group(entry): None for entry in listed}
        if len(groups) != 1:
            raise ConfigError(_not_one(list(groups), device))
        (self._group,) = groups
        # The name is that of the device's own backend, because a plan names the backend that can
        # run it.
        self.name = entry_for_device(self._group.device.type).name
        # As in the device's own backend, so that a replay decides as tuning on the device would.
        self.blocks_host = self._group.device.type == "cpu"
        self.protocol = self._group.protocol
        # A chunk that is written into a slice may take another time than one that allocates its
        # result, so chunks are measured in each role. Some recordings have only
        # measurements in role `ALONE`. Then these count for the other roles as well, because on a
        # GPU the same implementation runs in every role.
        if all(entry.key.conditions.role == Role.ALONE for entry in listed):
            listed += [one for entry in listed for one in _stand_ins(entry)]
        # Times of first runs are left out: the same candidates were timed in full.
        self.measurements = [one for one in listed if one.key.subject != Subject.FIRST_RUN]
        # `_entries` has measurements by problem, algorithm and role. `_sizes` has the measured
        # batches by problem (at batch 1) and algorithm.
        self._entries: dict[Problem, dict[str, dict[Role, Measurement]]] = {}
        self._sizes: dict[tuple[Problem, str], list[int]] = {}
        for entry in listed:
            problem, algorithm = entry.key.problem, entry.key.algorithm
            # Only chunks are candidates, so other measurements, such as those of whole calls, are
            # skipped.
            if entry.key.subject != Subject.CHUNK:
                continue
            by_role = self._entries.setdefault(problem, {}).setdefault(algorithm, {})
            if not by_role:
                geometry = problem.with_batch(1)
                self._sizes.setdefault((geometry, algorithm), []).append(problem.batch)
            by_role[entry.key.conditions.role] = entry
        for sizes in self._sizes.values():
            sizes.sort()

    def device(self) -> Device:
        return self._group.device

    def software(self) -> Software:
        return self._group.software

    def conditions(self) -> Conditions:
        return self._group.conditions

    def refusal(self, problem: Problem, algorithm: str) -> str | None:
        """Reason why an algorithm is no candidate; None if it computed this or a larger batch."""
        sizes = self._sizes.get((problem.with_batch(1), algorithm), [])
        # An algorithm that computed a larger batch also computes a smaller one.
        for size in sizes[bisect_left(sizes, problem.batch) :]:
            entries = self._entries[problem.with_batch(size)][algorithm].values()
            if any(entry.status != "failed" for entry in entries):
                return None
        return f"the recording of {self.device()} has no measurement of it"

    def slab_refusal(self, problem: Problem, algorithm: str) -> str | None:
        del problem, algorithm
        # No slab is refused, because a recording says nothing about slabs at the ends of a
        # tensor: it has measurements of only one slab of each height.
        return None

    def candidates(self, problem: Problem, adds_bias: bool = False) -> tuple[Candidate, ...]:
        """Candidates measured at exactly this batch, torch's own convolution first."""
        by_name = self._entries.get(problem, {})
        entries = (next(iter(by_name[name].values())) for name in _default_first(by_name))
        return tuple(
            Candidate(
                problem,
                entry.key.algorithm,
                notes=entry.notes,
                implementation=entry.implementation,
                is_deterministic=entry.is_deterministic,
                adds_bias=entry.adds_bias,
            )
            for entry in entries
            if entry.adds_bias == adds_bias
        )

    def implementation_of(self, problem: Problem, algorithm: str) -> str:
        sizes = self._sizes.get((problem.with_batch(1), algorithm), [])
        # If the recorded batches on both sides of this batch run the same implementation, this
        # batch is assumed to run it, too. Otherwise the implementation at this batch gets a name of
        # its own, so that nothing is inferred from the times of other batches.
        at = bisect_left(sizes, problem.batch)
        kernels = {
            self._implementation(problem, algorithm, size)
            for size in sizes[max(0, at - 1) : at + 1]
        }
        if problem.batch in sizes:
            return self._implementation(problem, algorithm, problem.batch)
        return kernels.pop() if len(kernels) == 1 else f"{algorithm} at {problem.batch}"

    def _implementation(self, problem: Problem, algorithm: str, size: int) -> str:
        entries = self._entries[problem.with_batch(size)][algorithm].values()
        return next((e.implementation for e in entries if e.implementation), algorithm)

    def executable(self, problem: Problem, algorithm: str) -> Executable:
        self._refuse(f"{algorithm} on {problem}")

    def operands(self, problem: Problem, samples: int) -> tuple[Tensor, Tensor]:
        self._refuse(f"{problem} on {samples} samples")

    def workspace_bytes(
        self, run: Callable[[], Tensor | None], parts: Iterable[tuple[Problem, str]]
    ) -> int:
        self._refuse(f"{run} of {list(parts)}")

    def elapsed_ns(self, run: Callable[[], object]) -> int:
        self._refuse(str(run))

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"a recording of {self.device()} runs nothing, so it cannot run {what}; use backend="
            f"{self.name!r} where the device is"
        )

    def cache_bytes(self) -> int:
        return 0

    def available_bytes(self) -> int:
        return 0


def _group(entry: Measurement) -> _Group:
    key = entry.key
    # The role belongs to the chunk, not to the machine, so roles do not make different groups.
    return _Group(key.device, key.software, replace(key.conditions, role=Role.ALONE), key.protocol)


def _not_one(groups: Sequence[_Group], device: str | None) -> str:
    of = "" if device is None else f" of a device called {device!r}"
    if not groups:
        return (
            f"backend='recorded' replays the measurements of the cache, and it has none{of}; "
            f"import or merge some, or name another cache"
        )
    there = "; ".join(map(str, groups))
    if len({group.device for group in groups}) > 1:
        return (
            f"device must name one of the devices in the cache, which has measurements of {there}"
        )
    return (
        f"a recording must hold one set of versions and conditions, this one has {there}; "
        f"export what is wanted with `ucudnn cache export FILE --where`, and replay that file"
    )


def _default_first(names: Iterable[str]) -> tuple[str, ...]:
    # The names are sorted, so that a replayed plan does not depend on the order of the recorded
    # measurements.
    return tuple(sorted(names, key=lambda name: (name != DEFAULT_ALGORITHM, name)))


def _stand_ins(alone: Measurement) -> Iterator[Measurement]:
    """What a chunk that was measured by itself counts for in the other roles of a split."""
    if alone.key.subject != Subject.CHUNK:
        return
    problem, workspace = alone.key.problem, alone.workspace_bytes
    # In half precision the gradient of each chunk is a temporary tensor, which is then added to a
    # sum in float32.
    if workspace is not None and problem.op == "wgrad" and problem.bytes_per_element < 4:
        workspace += prod(problem.w_shape) * problem.bytes_per_element
    for role in dict.fromkeys(role_of(problem, one) for one in (Role.FIRST, Role.LATER)):
        if role == Role.ALONE:
            continue
        conditions = replace(alone.key.conditions, role=role)
        key = replace(alone.key, conditions=conditions)
        yield replace(alone, key=key, workspace_bytes=workspace)
