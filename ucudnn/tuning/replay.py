"""Replay measurements taken elsewhere: open a recording, and predict whole calls."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ucudnn import cache as cache_room
from ucudnn.axis import AbstractAxis
from ucudnn.backends.cudnn.offline import list_configurations
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.cache import AbstractCache, MemoryCache
from ucudnn.cache.base import explain, key_texts
from ucudnn.cache.exchange import read_entries
from ucudnn.errors import PlanError
from ucudnn.measurement import Measurement, Subject
from ucudnn.plan import DEFAULT_ALGORITHM, Split, Timing
from ucudnn.problem import Problem
from ucudnn.tuning.confirmation import Finalist
from ucudnn.tuning.session import Session
from ucudnn.tuning.splits import AbstractSplitTable, known_chunks

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
    engines = filter(_is_engine, of_device)
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
            if not _is_engine(entry) or (entry.key.problem, entry.key.algorithm) in listed
        ),
        profile.name,
    )


def _is_engine(entry: Measurement) -> bool:
    """True for an engine of cuDNN that computes a plain convolution, as listed without a GPU."""
    # torch's own convolution is there with any version of cuDNN.
    is_candidate = entry.key.subject == Subject.CHUNK and entry.key.algorithm != DEFAULT_ALGORITHM
    return is_candidate and not entry.adds_bias


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
    tables: Sequence[AbstractSplitTable], splits: Sequence[Split], default: Measurement | None
) -> list[Finalist]:
    """Finalists for `choose`, with the sums of their steps as predicted times.

    A split with a step that was not timed in its position is left out.

    Args:
        tables: split tables that contain the chunks of the splits.
        splits: along any axis.
        default: torch's own convolution of the whole batch, as far as it was measured.
    """
    found = (_measured(split, default) or _summed(split, tables) for split in splits)
    return [finalist for finalist in found if finalist is not None]


def _measured(split: Split, default: Measurement | None) -> Finalist | None:
    """Torch's own convolution as it was measured; None for any other split, or without a time."""
    if not split.is_default or default is None or default.time_ns is None:
        return None
    spread_ns, samples = default.spread_ns or 0, default.samples or (default.time_ns,)
    timing = Timing(default.time_ns, spread_ns, default.workspace_bytes or 0, len(samples))
    # One sample each, whose ratio `choose` takes as it is: a prediction is the sum of medians, and
    # an interval of it is not known.
    facts = (default.is_deterministic, default.is_perturbed)
    return Finalist(split, timing, (default.time_ns,), *facts)


def _summed(split: Split, tables: Sequence[AbstractSplitTable]) -> Finalist | None:
    """A split by the fastest measurements of its steps; None if a step has none."""
    chunks = known_chunks(tables, split)
    if chunks is None:
        return None
    time_ns = sum(item.time_ns for item in chunks)
    workspace = max(item.workspace_bytes for item in chunks)
    # 0 samples mark a time as predicted.
    timing = Timing(time_ns, spread_ns=0, workspace_bytes=workspace, samples=0)
    return Finalist(split, timing, samples=(time_ns,))
