"""Run under a counting malloc: print true and reported workspace of candidates, as JSON lines."""

from __future__ import annotations

import ctypes
import json
import sys
from functools import partial

from ucudnn.backends import open_backend
from ucudnn.problem import BYTES_BY_DTYPE, OPS, Problem

# Large enough that a table or a thread's stack is small beside the workspace.
GEOMETRIES = {
    "3x3": {"input_size": (40, 40), "kernel_size": (3, 3), "padding": ((1, 1), (1, 1))},
    "1x1": {"input_size": (40, 40), "kernel_size": (1, 1)},
    "1x1-strided": {"input_size": (40, 40), "kernel_size": (1, 1), "stride": (2, 2)},
    "5x5-strided": {"input_size": (40, 40), "kernel_size": (5, 5), "stride": (2, 2)},
    "dilated": {"input_size": (28, 28), "kernel_size": (3, 3), "dilation": (2, 2)},
    "grouped": {"input_size": (28, 28), "kernel_size": (3, 3), "groups": 32},
    "1d": {"input_size": (900,), "kernel_size": (5,)},
    "3d": {"input_size": (12, 12, 12), "kernel_size": (3, 3, 3)},
}


def main() -> None:
    library = ctypes.CDLL(sys.argv[1])
    library.counted_live.restype = library.counted_peak.restype = ctypes.c_long
    backend = open_backend("torch_cpu")
    for name, geometry in GEOMETRIES.items():
        for op in OPS:
            for dtype in BYTES_BY_DTYPE:
                problem = Problem(op, 8, 32, 64, dtype=dtype, **geometry)
                a, b = backend.operands(problem, problem.batch)
                for candidate in backend.candidates(problem):
                    part = (problem, candidate.algorithm)
                    run = partial(backend.executable(*part).alone, a, b)
                    reported = backend.workspace_bytes(run, [part])
                    library.counted_reset()
                    before = library.counted_live()
                    result = run()
                    true = library.counted_peak() - before - result.untyped_storage().nbytes()
                    row = [name, op, dtype, candidate.algorithm, true, reported]
                    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
