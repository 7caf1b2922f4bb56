"""Plans made by hand: kernels that an algorithm computes undivided, on a device that is none.

And costs of algorithms for the scripted backend, with the fastest splits by brute force.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucudnn.config import Config
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.plan import BY_BATCH, KernelPlan, Plan, Timing
from ucudnn.problem import Problem

if TYPE_CHECKING:
    from ucudnn.backends import AbstractBackend

MIB = 1 << 20
MS = 1_000_000


def linear(
    ms_per_sample: float, mib_per_sample: float = 0.0, fixed_ms: float = 0.0
) -> Callable[[int], tuple[int, int]]:
    """Time in ns and workspace in bytes of a chunk, which grow with it."""
    return lambda size: (
        int((fixed_ms + ms_per_sample * size) * MS),
        int(mib_per_sample * size * MIB),
    )


def random_costs(seed: int) -> dict[str, Callable[[int], tuple[int, int]]]:
    """Costs of three algorithms, drawn by chance."""
    chance = random.Random(seed)
    return {
        name: linear(chance.randint(2, 9), chance.randint(0, 12) / 4, chance.randint(0, 6))
        for name in ("torch_default", "fast", "lean")
    }


def chunks_of(
    costs: dict[str, Callable[[int], tuple[int, int]]], sizes: Iterable[int]
) -> set[tuple[int, int, int]]:
    """Size, time and workspace of the chunks that these algorithms compute."""
    return {(size, *cost(size)) for size in sizes for cost in costs.values()}


def front(chunks: Collection[tuple[int, int, int]], batch: int) -> tuple[tuple[int, int], ...]:
    """Least times of all splits of a batch into such chunks, by the workspace that they may use."""
    found: list[tuple[int, int]] = []
    for limit in sorted({workspace for _, _, workspace in chunks}):
        best = [0] + [None] * batch
        for n in range(1, batch + 1):
            times = [
                best[n - size] + time_ns
                for size, time_ns, workspace in chunks
                if workspace <= limit and size <= n and best[n - size] is not None
            ]
            best[n] = min(times, default=None)
        if best[batch] is not None and (not found or best[batch] < found[-1][1]):
            found.append((limit, best[batch]))
    return tuple(found)


def least_ns(points: Iterable[tuple[int, int]], limit: int | None) -> int | None:
    """The least time of a front within a limit; None where nothing fits."""
    return min(
        (time_ns for size, time_ns in points if limit is None or size <= limit), default=None
    )


def kernel(
    size: int,
    *,
    batch: int = 2,
    width: int = 1,
    layout: str = "nchw",
    timing: Timing = Timing(10, 0, 0, 5),  # noqa: B008 - it never changes
    default: Timing = Timing(20, 0, 4 * MIB, 5),  # noqa: B008
    **more: Any,
) -> KernelPlan:
    """A forward pass of images of one size by gemm, whose default takes 4 MiB."""
    fields = {
        "problem": Problem("fprop", batch, 2, 2, (size, size), (width, width), layout=layout),
        "layers": ("layer",),
        "algorithms": ("gemm",),
        "alone": (0,) * batch,
        "last": ((0, -1),) * batch,
        "predicted_time_ns": timing.time_ns,
        "timing": timing,
        "default": default,
    }
    return KernelPlan(**{**fields, **more})


def signed(document: dict[str, Any], path: Path) -> Path:
    """A file of a plan with the checksum of what it holds, as whoever edits one could write it."""
    rest = {name: value for name, value in document.items() if name != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**rest, "checksum": sha256(text.encode()).hexdigest()}))
    return path


def plan_of(*kernels: KernelPlan, config: Config | None = None, **more: Any) -> Plan:
    """A plan of these kernels."""
    made_on = Device("cpu", "scripted"), Software("0"), Conditions()
    return Plan(kernels, *made_on, config or Config(), **more)


def where_it_can(backend: AbstractBackend, algorithm: str, chunk: int) -> Callable[[Problem], str]:
    """This algorithm for problems whose chunks of this size it computes, else torch's own."""

    def algorithm_of(problem: Problem) -> str:
        # Some algorithms compute a whole batch and refuse a single sample of it.
        sizes = {min(chunk, n) for n in range(1, problem.batch + 1)}
        refusals = [backend.refusal(problem.with_batch(size), algorithm) for size in sizes]
        return "torch_default" if any(refusals) else algorithm

    return algorithm_of


def in_chunks(
    backend: AbstractBackend,
    layers: Iterable[tuple[str, Problem]],
    chunk: int,
    algorithm_of: Callable[[Problem], str] = lambda _: "torch_default",
    config: Config | None = None,
) -> Plan:
    """A plan for this machine that computes every batch of these layers in chunks of one size."""
    timing = Timing(1, 0, 0, 1)
    kernels = tuple(
        KernelPlan(
            problem=problem,
            layers=(name,),
            algorithms=(algorithm_of(problem),),
            alone=(BY_BATCH,) * problem.batch,
            last=tuple((min(chunk, n), 0) for n in range(1, problem.batch + 1)),
            predicted_time_ns=1,
            timing=timing,
            default=timing,
        )
        for problem, name in {problem: name for name, problem in layers}.items()
    )
    made_on = backend.device(), backend.software(), backend.conditions()
    return Plan(kernels, *made_on, config or Config(), backend.name)
