"""Exchange of measurements between hosts' caches, so that nobody measures them again."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ucudnn.backends import AbstractBackend
from ucudnn.cache.entries import Entry
from ucudnn.distributed.journal import Journal
from ucudnn.distributed.meeting import Meeting
from ucudnn.errors import UcudnnError
from ucudnn.measurement import Conditions
from ucudnn.problem import Problem


def packed(value: object) -> bytes:
    """A value as it is sent to ranks of the same job."""
    return zlib.compress(pickle.dumps(value))


def unpacked(data: bytes) -> object:
    """Value that a rank of this job gave to `packed`; an error of ours is raised."""
    value: object = pickle.loads(zlib.decompress(data))  # noqa: S301 - no stranger has the store
    if isinstance(value, UcudnnError):
        raise value
    return value


def share_known(
    meeting: Meeting,
    team: Sequence[int],
    journal: Journal,
    backend: AbstractBackend,
    parts: Sequence[Problem],
    part_of: Callable[[Problem], Problem],
) -> None:
    """Bring all ranks of a team to what the best informed of them knows of each part of the work.

    Args:
        meeting: all ranks.
        team: those that share work.
        journal: of this rank.
        backend: whose measurements count.
        parts: a problem that stands for each part.
        part_of: the problem that stands for the part to which a problem belongs.
    """
    caches = meeting.exchange("caches", list(journal.mates))
    if len(set(map(tuple, caches.values()))) == 1:
        return  # all look into one folder
    known: dict[Problem, list[Entry]] = {part: [] for part in parts}
    for entry in _that_count(journal.cache.entries(), backend):
        part = part_of(entry.measurement.key.problem)
        if part in known:
            known[part].append(entry)
    counts = meeting.exchange("known", [len(known[part]) for part in parts])
    best = [
        max(team, key=lambda rank, item=item: counts[rank][item])  # type: ignore[misc]
        for item in range(len(parts))
    ]
    asked = [
        item
        for item, rank in enumerate(best)
        if any(counts[other][item] < counts[rank][item] for other in team)
    ]
    for item in asked:
        if best[item] == meeting.rank:
            data = packed(known[parts[item]])
            meeting.store.set(_key(team, item), data)  # type: ignore[arg-type]
    meeting.exchange("knowledge", "sent")
    for item in asked:
        if counts[meeting.rank][item] < counts[best[item]][item]:
            told = unpacked(meeting.store.get(_key(team, item)))
            assert isinstance(told, list)
            journal.cache.put_entries(told)


def _key(team: Sequence[int], item: int) -> str:
    return f"known/{team[0]}/{item}"


def _that_count(entries: Iterable[Entry], backend: AbstractBackend) -> Iterable[Entry]:
    """Entries that this backend could find: of its device, versions and conditions."""
    here = (backend.device(), backend.software(), backend.conditions())
    for entry in entries:
        key = entry.measurement.key
        if (key.device, key.software, replace(key.conditions, role=Conditions().role)) == here:
            yield entry
