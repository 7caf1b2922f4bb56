"""Exchange of measurements between the caches of several hosts, so that none are taken again."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ucudnn.backends import AbstractBackend
from ucudnn.cache.entries import Entry
from ucudnn.distributed.journal import Journal
from ucudnn.distributed.rendezvous import Rendezvous
from ucudnn.errors import UcudnnError
from ucudnn.measurement import Conditions
from ucudnn.problem import Problem


def packed(value: object) -> bytes:
    """Serialize a value for ranks of the same job.

    >>> unpacked(packed([1, 2]))
    [1, 2]
    """
    return zlib.compress(pickle.dumps(value))


def unpacked(data: bytes) -> object:
    """Restore a value that a rank of this job serialized with `packed`.

    Raises:
        UcudnnError: the value is an error that another rank passes on.
    """
    # pickle is safe here: only the ranks of the job can write to its store
    value: object = pickle.loads(zlib.decompress(data))  # noqa: S301
    if isinstance(value, UcudnnError):
        raise value
    return value


def sync_measurements(
    rendezvous: Rendezvous,
    team: Sequence[int],
    journal: Journal,
    backend: AbstractBackend,
    keys: Sequence[Problem],
    key_of: Callable[[Problem], Problem],
) -> None:
    """Give every rank of a team, for each work item, the measurements of the rank with the most.

    Args:
        rendezvous: all ranks of the job.
        team: the ranks that share the work.
        journal: the journal of this rank; received measurements go there.
        backend: only measurements of its device, versions and conditions are exchanged.
        keys: the work-group key of each item.
        key_of: computes the work-group key of a problem.
    """
    peers = rendezvous.exchange("caches", list(journal.peers))
    if len(set(map(tuple, peers.values()))) == 1:
        return  # all ranks use one folder
    known: dict[Problem, list[Entry]] = {key: [] for key in keys}
    for entry in _usable(journal.cache.entries(), backend):
        key = key_of(entry.measurement.key.problem)
        if key in known:
            known[key].append(entry)
    counts = rendezvous.exchange("cached measurements", [len(known[key]) for key in keys])
    # For each item the rank with the most measurements. Only counts are compared: what another rank
    # has beyond those is at worst measured a second time.
    senders = [
        max(team, key=lambda rank, item=item: counts[rank][item])  # type: ignore[misc]
        for item in range(len(keys))
    ]
    requested = [
        item
        for item, sender in enumerate(senders)
        if any(counts[rank][item] < counts[sender][item] for rank in team)
    ]
    for item in requested:
        if senders[item] == rendezvous.rank:
            data = packed(known[keys[item]])
            rendezvous.store.set(_store_key(team, item), data)  # type: ignore[arg-type]
    rendezvous.exchange("missing measurements", "sent")
    for item in requested:
        if counts[rendezvous.rank][item] < counts[senders[item]][item]:
            received = unpacked(rendezvous.store.get(_store_key(team, item)))
            assert isinstance(received, list)
            journal.cache.put_entries(received)


def _store_key(team: Sequence[int], item: int) -> str:
    # No rank is in two teams, so a team's first rank identifies it.
    return f"measurements/{team[0]}/{item}"


def _usable(entries: Iterable[Entry], backend: AbstractBackend) -> Iterable[Entry]:
    """Entries that this backend could find: of its device, versions and conditions, in any role."""
    here = (backend.device(), backend.software(), backend.conditions())
    for entry in entries:
        key = entry.measurement.key
        if (key.device, key.software, replace(key.conditions, role=Conditions().role)) == here:
            yield entry
