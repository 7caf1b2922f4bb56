"""Replay measurements taken elsewhere: open a recording, and predict whole calls."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from ucudnn import cache as cache_room
from ucudnn.axis import AbstractAxis, axis_of
from ucudnn.backends.cudnn.deviceless import list_configurations
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.cache import AbstractCache, MemoryCache
from ucudnn.cache.exchange import read_entries
from ucudnn.cache.explain import explain, key_texts
from ucudnn.errors import PlanError
from ucudnn.measurement import Measurement
from ucudnn.plan import Split, Timing
from ucudnn.problem import Problem
from ucudnn.solvers import Item
from ucudnn.tuning.confirmation import Finalist
from ucudnn.tuning.session import Session
from ucudnn.tuning.solve import Solved, SolvedRows

# How the names of cuDNN's algorithms begin; torch's own convolution has another name, and is
# there with any version of cuDNN.
_ENGINE = "eng"
# Fields of a key that a plan needs in many values. A miss of a whole kernel says in which of the
# other fields the nearest entry differs.
_ANY = ("algorithm", "conditions.role", "protocol")


def open_recording(path: str | None) -> AbstractCache:
    """Open measurements for replay.

    Args:
        path: a cache's folder, or a .csv or .json file that `ucudnn cache export` wrote; None: the
            user's cache.

    Raises:
        CacheError: the file cannot be read.
    """
    # A cache is a folder; what does not exist is reported by `cache.open`.
    if path is None or not os.path.isfile(path):
        return cache_room.open(path, "r")
    cache = MemoryCache()
    cache.put_entries(read_entries(path))
    return cache


def recorded_by_profile(cache: AbstractCache, path: str) -> RecordedBackend:
    """The recording of a profile's device, as far as the installed cuDNN could run it.

    Args:
        cache: the measurements.
        path: the profile's file.

    Raises:
        ConfigError: the profile cannot be read, or there are no measurements of its device.
        UnsupportedError: cuDNN cannot plan here.
    """
    profile = DeviceProfile.load(path)
    of_device = [
        entry
        for entry in cache
        if entry.key.device.name == profile.name
        and entry.key.device.compute_capability == profile.compute_capability
    ]
    engines = [entry for entry in of_device if entry.key.algorithm.startswith(_ENGINE)]
    problems = list(dict.fromkeys(entry.key.problem for entry in engines))
    # What was recorded with another version may not exist in the cuDNN that is installed here, and
    # a plan must not hold it.
    listed = {
        (listing.problem, one.identity)
        for listing in list_configurations(problems, profile)
        for one in listing.configurations
    }
    return RecordedBackend(
        (
            entry
            for entry in of_device
            if not entry.key.algorithm.startswith(_ENGINE)
            or (entry.key.problem, entry.key.algorithm) in listed
        ),
        profile.name,
    )


def recall(session: Session, axis: AbstractAxis, sizes: Iterable[int]) -> list[Measurement]:
    """Measurements of a kernel's chunks of some sizes, from the session's recording."""
    backend = session.backend
    assert isinstance(backend, RecordedBackend)
    found = backend.measurements(axis.problem, [axis.part(size) for size in sizes])
    return [session.reuse(entry) for entry in found]


def miss(session: Session, problem: Problem) -> PlanError:
    """Reason why a kernel without recorded measurements cannot be planned, with the nearest one."""
    texts = key_texts(session.key(problem, ""))
    wanted = {name: texts[name] for name in texts if name not in _ANY}
    nearest = explain(wanted, (entry.key for entry in session.cache))
    return PlanError(
        f"the recording of {session.backend.device()} has no measurement of {problem} at any of "
        f"the micro-batches allowed; {nearest}"
    )


def predict(
    solved: Sequence[Solved],
    rows: SolvedRows,
    splits: Sequence[Split],
    default: Measurement | None,
) -> list[Finalist]:
    """Finalists for `choose`, with the sums of their steps as predicted times.

    A split with a step that was not timed in its role is left out.

    Args:
        solved: costs of micro-batches, by plain algorithms and by those that add a bias.
        rows: costs of slabs.
        splits: along either axis.
        default: torch's own convolution of the whole batch, as far as it was measured.
    """
    finalists = []
    for split in splits:
        if split.is_default and default is not None and default.time_ns is not None:
            spread_ns, samples = default.spread_ns or 0, default.samples or (default.time_ns,)
            workspace = default.workspace_bytes or 0
            timing = Timing(default.time_ns, spread_ns, workspace, len(samples))
            # One sample each, whose ratio `choose` takes as it is: a prediction is the sum of
            # medians, and an interval of it is not known.
            finalists.append(Finalist(split, timing, samples=(default.time_ns,)))
            continue
        items = [*_items(solved, rows, split)]
        if all(items):
            time_ns = sum(item.time_ns for item in items if item)
            workspace = max(item.workspace_bytes for item in items if item)
            # 0 samples mark a time as predicted.
            timing = Timing(time_ns, spread_ns=0, workspace_bytes=workspace, samples=0)
            finalists.append(Finalist(split, timing, samples=(time_ns,)))
    return finalists


def _items(solved: Sequence[Solved], rows: SolvedRows, split: Split) -> Iterator[Item | None]:
    """The fastest measurement of each step; None if a step has none."""
    axis = axis_of(rows.axis.problem, split)
    for number, step in enumerate(split.steps):
        if split.axis == "spatial":
            known = rows.later if number else rows.first
        else:
            role = "alone" if len(split.steps) == 1 else "later" if number else "first"
            known = tuple(item for one in solved for item in one.items[role])
        # The last slab may have fewer rows than it was measured with; it counts as a full one.
        size = axis.size_of(step)
        fitting = (item for item in known if (item.batch, item.algorithm) == (size, step.algorithm))
        yield min(fitting, key=_time_ns, default=None)


def _time_ns(item: Item) -> int:
    return item.time_ns
