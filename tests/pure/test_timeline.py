"""A snapshot of a step's memory: read by torch's own code, and by the rules of its viewer."""

from __future__ import annotations

import pickle
import pickletools
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ucudnn.outcomes import StepMemory
from ucudnn.timeline import Block, largest, snapshot

# What the page of pytorch.org/memory_viz can unpickle (torch/utils/viz/MemoryViz.js).
KNOWN = {
    *("APPEND", "APPENDS", "BINGET", "BININT", "BININT1", "BININT2"),
    *("EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET", "MARK"),
    *("MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2"),
    *("NEWFALSE", "BINPUT", "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE"),
    *("BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "LONG_BINPUT", "LIST"),
    *("DICT", "SETITEM"),
}


def blocks(seed: int, count: int = 60) -> tuple[Block, ...]:
    """Blocks that begin and end anywhere; some outlive the step."""
    chance = random.Random(seed)
    found = []
    for place in range(1, count):
        end = chance.choice([0, place + 1, chance.randint(place + 1, count + 9)])
        found.append(Block(f"layer.{place % 5}", chance.randint(1, 9000), place, end))
    return tuple(found)


def highest(ones: Iterable[Block]) -> int:
    """The most bytes at once, in whole pieces of 512."""
    sizes = [(one, -(-one.bytes // 512) * 512) for one in ones]
    moments = {number for one, _ in sizes for number in one[2:]}
    return max(
        sum(size for one, size in sizes if one.begin <= now and (now < one.end or not one.end))
        for now in moments
    )


def levels(trace: Iterable[dict[str, Any]]) -> dict[str, int]:
    """The most bytes at once of each step, after a check that no two blocks overlap."""
    alive, peaks = dict[int, int](), dict[str, int]()
    for one in trace:
        at, size = one["addr"], one["size"]
        if one["action"] == "alloc":
            assert all(at + size <= other or other + n <= at for other, n in alive.items())
            alive[at] = size
        elif one["action"] == "free_completed":
            assert alive.pop(at) == size
        step = one["frames"][0]["filename"]
        peaks[step] = max(peaks.get(step, 0), sum(alive.values()))
    return peaks


@pytest.mark.parametrize("seed", range(20))
def test_a_trace_allocates_and_frees_what_the_steps_do(seed: int) -> None:
    one, other = blocks(seed), blocks(seed + 100)
    found = snapshot({"parameters": 4096}, {"one": one, "other": other})
    peaks = levels(found["device_traces"][0])
    assert peaks == {"held": 4096, "one": 4096 + highest(one), "other": 4096 + highest(other)}
    (segment,) = found["segments"]
    assert segment["total_size"] >= max(peaks.values())
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


def test_torch_reads_it(tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    path = tmp_path / "step.pickle"
    memory = StepMemory(
        *(1 << 20, 4096, 0, 8192, 512, 1 << 20, 1 << 20),
        torch_blocks=blocks(1),
        plan_blocks=blocks(2),
    )
    memory.save(path)
    data = path.read_bytes()
    assert {code.name for code, *_ in pickletools.genops(data)} <= KNOWN
    assert data[1] == 4
    loaded = pickle.loads(data)
    assert "12.5KiB" in _memory_viz.segsum(loaded)
    events = _memory_viz.trace(loaded)
    assert events.count("# free completed") == 2 * len(blocks(1))


def test_the_largest_blocks_are_kept_in_order() -> None:
    many = blocks(3, 3000)
    kept = largest(many)
    assert len(kept) == 1000
    assert list(kept) == sorted(kept, key=lambda one: one.begin)
    assert min(one.bytes for one in kept) >= sorted(one.bytes for one in many)[-1001]
