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
from ucudnn.measurement import Role
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
    known = _known_entries(journal, backend, keys, key_of)
    counts = rendezvous.exchange("cached measurements", [len(known[key]) for key in keys])
    transfers = [
        _transfer({rank: counts[rank][item] for rank in team}) for item in range(len(keys))
    ]
    for item, (sender, receivers) in enumerate(transfers):
        if receivers and sender == rendezvous.rank:
            data = packed(known[keys[item]])
            rendezvous.store.set(_store_key(team, item), data)  # type: ignore[arg-type]
    rendezvous.exchange("missing measurements", "sent")
    for item, (_, receivers) in enumerate(transfers):
        if rendezvous.rank in receivers:
            received = unpacked(rendezvous.store.get(_store_key(team, item)))
            assert isinstance(received, list)
            journal.cache.put_entries(received)


def _known_entries(
    journal: Journal,
    backend: AbstractBackend,
    keys: Sequence[Problem],
    key_of: Callable[[Problem], Problem],
) -> dict[Problem, list[Entry]]:
    """The measurements that this rank could use, by the key of their work group."""
    known: dict[Problem, list[Entry]] = {key: [] for key in keys}
    for entry in _usable(journal.cache.entries(), backend):
        key = key_of(entry.measurement.key.problem)
        if key in known:
            known[key].append(entry)
    return known


def _transfer(count_by_rank: dict[int, int]) -> tuple[int, list[int]]:
    """The rank with the most measurements, which sends them, and those with fewer.

    >>> _transfer({0: 5, 1: 7, 2: 7})
    (1, [0])
    """
    # Only counts are compared: what another rank has beyond those is at worst measured again.
    sender = max(count_by_rank, key=count_by_rank.__getitem__)
    most = count_by_rank[sender]
    return sender, [rank for rank, count in count_by_rank.items() if count < most]


def _store_key(team: Sequence[int], item: int) -> str:
    # No rank is in two teams, so a team's first rank identifies it.
    return f"measurements/{team[0]}/{item}"


def _usable(entries: Iterable[Entry], backend: AbstractBackend) -> Iterable[Entry]:
    """Entries that this backend could find: of its device, versions and conditions, in any role."""
    here = (backend.device(), backend.software(), backend.conditions())
    for entry in entries:
        key = entry.measurement.key
        if (key.device, key.software, replace(key.conditions, role=Role.ALONE)) == here:
            yield entry
