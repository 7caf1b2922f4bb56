"""Lower bounds of times beside measured times: no bound may lie above its time.

    python benchmarks/roofline.py --runs 9

Kernels are what image, audio and volume networks are made of. Each algorithm is run alone on
operands that were just used, which is the fastest that it ever is. Its time is the shortest
processor time of the calling thread, which load on the machine lengthens least.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

from ucudnn.backends import open_backend
from ucudnn.problem import OPS, Problem
from ucudnn.units import format_bytes

SAME3, SAME31 = ((1, 1), (1, 1)), ((15, 15), (15, 15))
KERNELS = (
    (16, 64, 64, (56, 56), (3, 3), {"padding": SAME3}),
    (16, 128, 128, (28, 28), (3, 3), {"padding": SAME3}),
    (16, 256, 64, (56, 56), (1, 1), {}),
    (16, 64, 256, (56, 56), (1, 1), {}),
    (16, 64, 128, (56, 56), (1, 1), {"stride": (2, 2)}),
    (16, 3, 64, (224, 224), (7, 7), {"padding": ((3, 3), (3, 3)), "stride": (2, 2)}),
    (16, 144, 144, (56, 56), (3, 3), {"padding": SAME3, "groups": 144}),
    (8, 96, 96, (56, 56), (7, 7), {"padding": ((3, 3), (3, 3)), "groups": 96}),
    (4, 128, 128, (28, 28), (31, 31), {"padding": SAME31, "groups": 128}),
    (8, 128, 128, (56, 56), (3, 3), {"padding": SAME3, "groups": 32}),
    (4, 1, 512, (64000,), (10,), {"stride": (5,)}),
    (1, 768, 768, (128,), (128,), {"padding": ((64, 64),), "groups": 16}),
    (8, 512, 512, (400,), (31,), {"padding": ((15, 15),), "groups": 512}),
    (2, 512, 512, (1600,), (3,), {"stride": (2,)}),
    (1, 32, 64, (32, 32, 32), (3, 3, 3), {"padding": ((1, 1),) * 3}),
    (1, 16, 16, (14, 14), (3, 3), {"padding": SAME3}),
    (1, 64, 64, (14, 14), (1, 1), {}),
)


def measure(problem: Problem, runs: int, most_bytes: int) -> None:
    """Print one line for each algorithm that stays within the memory."""
    backend = open_backend("torch_cpu")
    roofline = backend.roofline(problem.dtype)
    assert roofline is not None
    a, b = backend.operands(problem, problem.batch)
    for algorithm in [candidate.algorithm for candidate in backend.candidates(problem)]:
        cost = backend.cost(problem, algorithm)
        assert cost is not None
        bound_ms = roofline.time_ns(cost) / 1e6
        line = f"{problem!s:62} {algorithm:14} {format_bytes(cost.workspace_bytes):>10}"
        if cost.workspace_bytes > most_bytes:
            print(f"{line} {bound_ms:9.3f}   too large")
            continue
        run = partial(backend.executable(problem, algorithm).alone, a, b)
        shortest_ms = min(processor_ns(run) for _ in range(runs)) / 1e6
        mark = "  ABOVE" if bound_ms > shortest_ms else ""
        print(f"{line} {bound_ms:9.3f} {shortest_ms:9.3f} {bound_ms / shortest_ms:6.2f}{mark}")


def processor_ns(run: partial) -> int:
    """Processor time of this thread."""
    before_ns = time.thread_time_ns()
    run()
    return max(1, time.thread_time_ns() - before_ns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--most-mib", type=int, default=1500)
    options = parser.parse_args()
    roofline = open_backend("torch_cpu").roofline(options.dtype)
    assert roofline is not None
    print(
        f"{roofline.operations_per_s / 1e9:.0f} GFLOP/s, {roofline.bytes_per_s / 1e9:.1f} GB/s\n"
        f"kernel, algorithm, least workspace, bound in ms, shortest of {options.runs} runs, ratio"
    )
    for batch, channels, filters, size, kernel, rest in KERNELS:
        for op in OPS:
            problem = Problem(
                op, batch, channels, filters, size, kernel, dtype=options.dtype, **rest
            )
            measure(problem, options.runs, options.most_mib << 20)


if __name__ == "__main__":
    main()
