"""Rendezvous: ranks find each other and all-gather values through the job's key-value store.

Ranks exchange values through the store that `init_process_group` made, in which each rendezvous has
its own keys. They use no collectives of a process group, for three reasons. Nothing runs on a GPU.
A rank that is late or dead is named after ucudnn's own timeout. And a rank that was stopped for a
while can still arrive, because no connection has broken meanwhile.
"""

from __future__ import annotations

import json
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store, _get_default_store

from ucudnn.errors import RankError

Group: TypeAlias = ProcessGroup | None
# Polling starts with the first interval and doubles it up to the second: a rendezvous of ranks that
# arrive together takes milliseconds, and a long wait does not load the server of the store.
_POLL_S = (0.005, 0.1)
# Values are sent in pieces of this size, because a store takes at most 8 MiB at once.
_PIECE_BYTES = 4 << 20


class Rendezvous:
    """The ranks of a group at the same point of their program.

    >>> with Rendezvous("example") as rendezvous:  # without a process group: this process alone
    ...     rendezvous.exchange("greetings", "hello")
    {0: 'hello'}

    `purpose` names the point of the program: ranks meet only ranks with the same purpose. A
    RankError names each rank that does not arrive or send in time. `rank` is this rank and `ranks`
    are all that take part, as numbered in the default group.
    """

    nonce: str  # random name, unique to this rendezvous
    store: Store  # has the keys of this rendezvous only

    def __init__(self, purpose: str, group: Group = None, timeout_s: float = 300.0) -> None:
        self._timeout_s = timeout_s
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.ranks = tuple(dist.get_process_group_ranks(group))
            job_store = _get_default_store()
        else:
            self.rank, self.ranks = 0, (0,)
            job_store = HashStore()
        if self.rank not in self.ranks:
            raise RankError(
                f"rank {self.rank} is not in the group of ranks {_list(self.ranks)}; call this on "
                f"the ranks of the group alone",
                (self.rank,),
            )
        members = sha256(repr(self.ranks).encode()).hexdigest()[:16]
        self._handshake: Store = PrefixStore(f"ucudnn/{purpose}/{members}", job_store)

    def __enter__(self) -> Self:
        # A store may outlive its ranks (torchrun keeps it over restarts), and then it still has the
        # keys of dead ranks. All ranks ignore these keys by a handshake: the first rank publishes a
        # new nonce, and accepts only answers that repeat it.
        try:
            self.nonce = self._lead() if self.rank == self.ranks[0] else self._join()
        except dist.DistError as error:
            raise _store_lost(error) from error
        self.store = PrefixStore(self.nonce, self._handshake)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, dist.DistError):
            raise _store_lost(error) from error

    def _lead(self) -> str:
        """Publish a new nonce, wait for the answers of all others, and confirm them."""
        nonce = os.urandom(8).hex()
        self._handshake.set("nonce", nonce)
        keys = {rank: f"answer/{rank}" for rank in self.ranks[1:]}
        tokens: dict[str, str] = {}

        def missing() -> list[int]:
            for rank, key in keys.items():
                if str(rank) not in tokens and self._handshake.check([key]):
                    answered, _, token = self._handshake.get(key).decode().partition(":")
                    if answered == nonce:
                        tokens[str(rank)] = token
            return [rank for rank in keys if str(rank) not in tokens]

        self._wait(lambda: not missing(), missing, "the rendezvous of all ranks")
        self._handshake.set(f"confirmed/{nonce}", json.dumps(tokens))
        return nonce

    def _join(self) -> str:
        """Answer the first rank's nonces until it has confirmed an answer of this very process."""
        token, answered = os.urandom(8).hex(), ""

        def missing() -> list[int]:
            nonlocal answered
            if not self._handshake.check(["nonce"]):
                return [self.ranks[0]]
            # This may be the nonce of an earlier rendezvous, which the first rank is about to
            # replace. So each new nonce is answered.
            nonce = self._handshake.get("nonce").decode()
            if nonce != answered:
                self._handshake.set(f"answer/{self.rank}", f"{nonce}:{token}")
                answered = nonce
            confirmed = f"confirmed/{nonce}"
            if self._handshake.check([confirmed]):
                # The token identifies this process, because an earlier process may have had the
                # same rank.
                tokens = json.loads(self._handshake.get(confirmed))
                if tokens.get(str(self.rank)) == token:
                    return []
            return [rank for rank in self.ranks[1:] if not self._has_answered(rank, nonce)] or [
                self.ranks[0]
            ]

        self._wait(lambda: not missing(), missing, "the rendezvous of all ranks")
        return answered

    def _has_answered(self, rank: int, nonce: str) -> bool:
        key = f"answer/{rank}"
        if not self._handshake.check([key]):
            return False
        return self._handshake.get(key).decode().startswith(f"{nonce}:")

    def send(self, topic: str, value: Any) -> None:
        """Send a value of this rank to all ranks; each value needs a topic of its own."""
        # Pickle is safe here: only ranks of the job write to its store.
        data = zlib.compress(pickle.dumps(value))
        pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self.store.set(f"{topic}/{self.rank}/{number}", piece)  # type: ignore[arg-type]
        # The number of pieces is set last: it says that all pieces are there.
        self.store.set(f"{topic}/{self.rank}", str(len(pieces)))

    def receive(self, topic: str, rank: int) -> Any:
        """Wait until one rank has sent its value, and return the value."""
        self._wait_for(topic, [rank], f"the sending of {topic}")
        return self._received(topic, rank)

    def exchange(self, topic: str, value: Any) -> dict[int, Any]:
        """All-gather a value: wait until all ranks have sent theirs, and return all by rank."""
        self.send(topic, value)
        self._wait_for(topic, self.ranks, f"the exchange of {topic}")
        return {rank: self._received(topic, rank) for rank in self.ranks}

    def _received(self, topic: str, rank: int) -> Any:
        count = int(self.store.get(f"{topic}/{rank}"))
        pieces = [self.store.get(f"{topic}/{rank}/{number}") for number in range(count)]
        return pickle.loads(zlib.decompress(b"".join(pieces)))  # noqa: S301

    def _wait_for(self, topic: str, ranks: Sequence[int], event: str) -> None:
        def have_sent(*ranks: int) -> bool:
            return self.store.check([f"{topic}/{rank}" for rank in ranks])

        # One request asks for all ranks.
        self._wait(lambda: have_sent(*ranks), lambda: [r for r in ranks if not have_sent(r)], event)

    def _wait(
        self, is_done: Callable[[], bool], missing: Callable[[], list[int]], event: str
    ) -> None:
        deadline = time.monotonic() + self._timeout_s
        pause_s, longest_s = _POLL_S
        while not is_done():
            if time.monotonic() > deadline and (named := tuple(missing())):
                raise RankError(
                    f"{name_ranks(named)} did not reach {event} within {self._timeout_s:g} s; it "
                    f"has ended, hangs or is much slower: look at its output, start the job again "
                    f"(what was measured is kept) or give a longer timeout",
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


def _store_lost(error: dist.DistError) -> RankError:
    return RankError(
        f"the job's store does not answer any more ({str(error).splitlines()[0]}): the process "
        f"that holds it has ended, which is torchrun's agent or else rank 0; start the job again, "
        f"what was measured is kept"
    )
