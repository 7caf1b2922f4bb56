"""Run under a counting malloc: print true and reported workspace of candidates, as JSON lines.

Arguments: the counting malloc, then the dtypes.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from functools import partial

from ucudnn.backends import open_backend
from ucudnn.execution.execute import Call, bind
from ucudnn.plan import Chunk, Split
from ucudnn.problem import OPS, Problem
from ucudnn.slabs import row_count

_3X3 = {"input_size": (40, 40), "kernel_size": (3, 3), "padding": ((1, 1), (1, 1))}
# Large enough that a table or a thread's stack is small beside the workspace.
GEOMETRIES = {
    "3x3": _3X3,
    "1x1": {"input_size": (40, 40), "kernel_size": (1, 1)},
    "1x1-strided": {"input_size": (40, 40), "kernel_size": (1, 1), "stride": (2, 2)},
    "5x5-strided": {"input_size": (40, 40), "kernel_size": (5, 5), "stride": (2, 2)},
    "dilated": {"input_size": (28, 28), "kernel_size": (3, 3), "dilation": (2, 2)},
    "3x3 nhwc": {**_3X3, "layout": "nhwc"},
    "5x5-strided nhwc": {
        "input_size": (40, 40),
        "kernel_size": (5, 5),
        "stride": (2, 2),
        "layout": "nhwc",
    },
    "grouped": {"input_size": (28, 28), "kernel_size": (3, 3), "groups": 32},
    "1d": {"input_size": (900,), "kernel_size": (5,)},
    "3d": {"input_size": (10, 10, 10), "kernel_size": (3, 3, 3)},
}
# Only of weight gradients: diagonal_gemm computes nothing else.
DEPTHWISE = {
    "in_channels": 64,
    "input_size": (40, 40),
    "kernel_size": (7, 7),
    "padding": ((3, 3), (3, 3)),
    "groups": 64,
}

# Three slabs, with padding at the first and the last one.
SLABS = {
    "2d slabs": {"input_size": (45, 40), "kernel_size": (3, 3), "padding": ((1, 1), (1, 1))},
    "3d slabs": {"input_size": (15, 8, 8), "kernel_size": (3, 3, 3), "padding": ((1, 1),) * 3},
}


def calls(problem: Problem) -> Iterator[tuple[str, Call]]:
    """The problem by every algorithm that computes all of it, undivided or by slabs."""
    backend = open_backend("torch_cpu")
    for candidate in backend.candidates(problem):
        name, rows = candidate.algorithm, row_count(problem)
        split = Split("batch", (Chunk(problem.batch, name),))
        if problem.input_size in {geometry["input_size"] for geometry in SLABS.values()}:
            split = Split("spatial", (Chunk(rows // 3, name),) * 3)
        yield name, bind(backend, problem, split)


def main() -> None:
    library = ctypes.CDLL(sys.argv[1])
    library.counted_live.restype = library.counted_peak.restype = ctypes.c_long
    backend = open_backend("torch_cpu")
    for name, geometry in {**GEOMETRIES, "depthwise": DEPTHWISE, **SLABS}.items():
        for op in ("wgrad",) if name == "depthwise" else OPS:
            for dtype in sys.argv[2:]:
                batch = 2 if name in SLABS else 4
                shape = {"in_channels": 32, "out_channels": 64, **geometry}
                problem = Problem(op, batch, dtype=dtype, **shape)
                a, b = backend.operands(problem, problem.batch)
                for algorithm, call in calls(problem):
                    run = partial(call, a, b)
                    reported = backend.workspace_bytes(run, call.parts)
                    library.counted_reset()
                    before = library.counted_live()
                    result = run()
                    true = library.counted_peak() - before - result.untyped_storage().nbytes()
                    kernel = backend.implementation_of(problem, algorithm)
                    row = [name, op, dtype, algorithm, kernel, true, reported]
                    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
