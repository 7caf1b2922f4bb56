"""What a step allocates and frees, in order, and a snapshot of it for PyTorch's memory viewer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from typing import Any, NamedTuple

from ucudnn.units import Count

# The most blocks that are kept of a step: the largest ones.
_MOST = 1000
# Blocks begin at multiples of the first number. The viewer takes an address of 0 for none.
_ALIGNED, _BASE = 512, 1 << 32


class Block(NamedTuple):
    """Memory that a step allocates at one moment and frees at another.

    Attributes:
        name: the module that allocated it, and what for.
        bytes: its size.
        begin: number of the event that allocated it.
        end: number of the event that freed it; 0: it outlives the step.
    """

    name: str
    bytes: Count
    begin: Count
    end: Count


def largest(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """The blocks that are worth keeping, in the order in which they were allocated."""
    kept = nlargest(_MOST, blocks, key=lambda one: one.bytes)
    return tuple(sorted(kept, key=lambda one: one.begin))


def snapshot(held: Mapping[str, int], steps: Mapping[str, Sequence[Block]]) -> dict[str, Any]:
    """Steps one after the other, as `torch.cuda.memory._snapshot()` describes memory.

    >>> found = snapshot({"parameters": 8}, {"torch": [Block("0", 4, 1, 2)]})
    >>> [(one["action"], one["size"]) for one in found["device_traces"][0][1:]]
    [('alloc', 512), ('alloc', 512), ('free_requested', 512), ('free_completed', 512)]

    Args:
        held: what is allocated before the steps and stays, in bytes by purpose.
        steps: the blocks of each step, by its name.
    """
    trace = list[dict[str, Any]]()
    room = _Room()
    stay = {name: room.take(size) for name, size in held.items() if size}
    for name, place in stay.items():
        trace.append(_entry("alloc", place, name, "held", len(trace)))
    for step, blocks in steps.items():
        places = dict[Block, tuple[int, int]]()
        last = max((number for one in blocks for number in one[2:]), default=0)
        frees = [(one.end or last + 1, False, one) for one in blocks]
        for _, is_new, one in sorted([*((one.begin, True, one) for one in blocks), *frees]):
            if is_new:
                places[one] = room.take(one.bytes)
                trace.append(_entry("alloc", places[one], one.name, step, len(trace)))
                continue
            place = places.pop(one)
            room.give(place)
            for action in ("free_requested", "free_completed"):
                trace.append(_entry(action, place, one.name, step, len(trace)))
    whole = _entry("segment_alloc", (0, room.top), "all memory", "held", 0)
    return {
        "segments": [_segment(room.top, stay)],
        "device_traces": [[whole, *trace]],
        "allocator_settings": {},
    }


class _Room:
    """Gives out places in memory, the lowest that is free first."""

    def __init__(self) -> None:
        self.top = 0
        self._free: list[tuple[int, int]] = []

    def take(self, size: int) -> tuple[int, int]:
        """(Address, size) of a place of at least this size."""
        size = -(-size // _ALIGNED) * _ALIGNED
        for number, (at, room) in enumerate(self._free):
            if room >= size:
                self._free[number : number + 1] = [(at + size, room - size)] if room > size else []
                return at, size
        if self._free and sum(self._free[-1]) == self.top:
            self.top, _ = self._free.pop()
        at, self.top = self.top, self.top + size
        return at, size

    def give(self, place: tuple[int, int]) -> None:
        """A place is free from now on."""
        merged = list[tuple[int, int]]()
        for at, size in sorted([*self._free, place]):
            if merged and sum(merged[-1]) == at:
                merged[-1] = merged[-1][0], merged[-1][1] + size
            else:
                merged.append((at, size))
        self._free = merged


def _entry(
    action: str, place: tuple[int, int], name: str, step: str, number: int
) -> dict[str, Any]:
    return {
        "action": action,
        "addr": _BASE + place[0],
        "size": place[1],
        "stream": 0,
        "time_us": number,
        "frames": _frames(name, step),
    }


def _frames(name: str, step: str) -> list[dict[str, Any]]:
    return [{"name": name, "filename": step, "line": 0}]


def _segment(size: int, stay: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """The memory at the end of the steps, in which only what is held is allocated."""
    blocks, at = [], 0
    for name, (address, length) in stay.items():
        blocks.append(
            {
                "address": _BASE + address,
                "size": length,
                "requested_size": length,
                "state": "active_allocated",
                "frames": _frames(name, "held"),
            }
        )
        at = address + length
    if size > at:
        rest = {"address": _BASE + at, "size": size - at, "requested_size": 0}
        blocks.append({**rest, "state": "inactive", "frames": []})
    allocated = sum(length for _, length in stay.values())
    return {
        "device": 0,
        "address": _BASE,
        "total_size": size,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": allocated,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
