"""Ranks meet at the job's key-value store: who is there, what each says, who is missing.

Everything goes through the store that `init_process_group` made, under keys of this meeting alone,
and through no process group: nothing is in flight on a GPU, a rank that is late or gone is named
after a time-out of our own, and one that was stopped may come late without breaking a connection.
A store may outlive its ranks (torchrun keeps it over restarts) and then still holds what the dead
ones wrote, so a meeting begins with answers that only the living can give.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store, _get_default_store

from ucudnn.errors import RankError

Group: TypeAlias = ProcessGroup | None
_POLL_S = (0.005, 0.1)


class Meeting:
    """The ranks of a group at one place of their program.

    Args:
        purpose: what they meet for; ranks that do something else do not meet these.
        group: a process group; None: all ranks, or this process alone where there is no group.
        timeout_s: how long to wait for a rank.

    Attributes:
        rank: of this process in the default group.
        ranks: of all who take part.
        name: of this meeting; no other one, before or at the same time, has it.
        store: keys of this meeting alone.

    Raises:
        RankError: on entering: a rank did not come in time; the message names it.
    """

    name: str
    store: Store

    def __init__(self, purpose: str, group: Group = None, timeout_s: float = 300.0) -> None:
        self._timeout_s = timeout_s
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.ranks = tuple(dist.get_process_group_ranks(group))
            whole = _get_default_store()
        else:
            self.rank, self.ranks = 0, (0,)
            whole = HashStore()
        if self.rank not in self.ranks:
            raise RankError(
                f"rank {self.rank} is not in the group of ranks {_list(self.ranks)}; call this on "
                f"the ranks of the group alone",
                (self.rank,),
            )
        members = sha256(repr(self.ranks).encode()).hexdigest()[:16]
        self._lobby: Store = PrefixStore(f"ucudnn/{purpose}/{members}", whole)

    def __enter__(self) -> Self:
        try:
            self.name = self._open() if self.rank == self.ranks[0] else self._join()
        except dist.DistError as error:
            raise _lost(error) from error
        self.store = PrefixStore(self.name, self._lobby)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, dist.DistError):
            raise _lost(error) from error

    def _open(self) -> str:
        """Invite the others under a new name, and admit those who answer it."""
        name = os.urandom(8).hex()
        self._lobby.set("name", name)
        guests = {rank: f"guest/{rank}" for rank in self.ranks[1:]}
        answers: dict[str, str] = {}

        def missing() -> list[int]:
            for rank, key in guests.items():
                if str(rank) not in answers and self._lobby.check([key]):
                    answered, _, token = self._lobby.get(key).decode().partition(":")
                    if answered == name:
                        answers[str(rank)] = token
            return [rank for rank in guests if str(rank) not in answers]

        self._wait(missing, "the meeting of all ranks")
        self._lobby.set(f"admitted/{name}", json.dumps(answers))
        return name

    def _join(self) -> str:
        """Answer invitations until the one of this time admits this very process."""
        token, answered = os.urandom(8).hex(), ""

        def missing() -> list[int]:
            nonlocal answered
            if not self._lobby.check(["name"]):
                return [self.ranks[0]]
            name = self._lobby.get("name").decode()
            if name != answered:
                self._lobby.set(f"guest/{self.rank}", f"{name}:{token}")
                answered = name
            admitted = f"admitted/{name}"
            if self._lobby.check([admitted]):
                answers = json.loads(self._lobby.get(admitted))
                if answers.get(str(self.rank)) == token:
                    return []
            return [rank for rank in self.ranks[1:] if not self._answers(rank, name)] or [
                self.ranks[0]
            ]

        self._wait(missing, "the meeting of all ranks")
        return answered

    def _answers(self, rank: int, name: str) -> bool:
        key = f"guest/{rank}"
        return self._lobby.check([key]) and self._lobby.get(key).decode().startswith(f"{name}:")

    def exchange(self, topic: str, said: Any) -> dict[int, Any]:
        """Values of all ranks, by rank, once all have sent theirs.

        Args:
            topic: once per meeting.
            said: JSON values.

        Raises:
            RankError: a rank did not speak in time; the message names it.
        """
        self.store.set(f"{topic}/{self.rank}", json.dumps(said))
        silent = dict.fromkeys(self.ranks)

        def missing() -> list[int]:
            for rank in list(silent):
                if not self.store.check([f"{topic}/{rank}"]):
                    break  # the others are looked for when this one has come, or is named
                del silent[rank]
            return list(silent)

        self._wait(missing, f"the exchange of {topic}", lambda rank: self._has_said(topic, rank))
        return {rank: json.loads(self.store.get(f"{topic}/{rank}")) for rank in self.ranks}

    def _has_said(self, topic: str, rank: int) -> bool:
        return self.store.check([f"{topic}/{rank}"])

    def _wait(
        self,
        missing: Callable[[], list[int]],
        what: str,
        is_there: Callable[[int], bool] = lambda _: False,
    ) -> None:
        deadline = time.monotonic() + self._timeout_s
        pause_s, longest_s = _POLL_S
        while absent := missing():
            if time.monotonic() > deadline:
                named = tuple(rank for rank in absent if not is_there(rank)) or tuple(absent)
                raise RankError(
                    f"{name_ranks(named)} did not come to {what} within {self._timeout_s:g} s; it "
                    f"has ended, hangs or is much slower: look at its output, start the job again "
                    f"(what was measured is kept) or give a longer time-out",
                    named,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks as the subject of a sentence.

    >>> name_ranks([3]), name_ranks([1, 2])
    ('rank 3', 'ranks 1, 2')
    """
    listed = list(ranks)
    return f"rank{'' if len(listed) == 1 else 's'} {_list(listed)}"


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _lost(error: dist.DistError) -> RankError:
    return RankError(
        f"the job's store does not answer any more ({str(error).splitlines()[0]}): the process "
        f"that holds it has ended, which is torchrun's agent or else rank 0; start the job again, "
        f"what was measured is kept"
    )
