"""Every algorithm of the CPU backend on a few kernels, in turn with torch's own convolution.

    python benchmarks/algorithms.py special --out algorithms.json
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/algorithms.py half

`special`: kernels of networks for which diagonal_gemm and phases are made. `half`: bfloat16 in
every op; with the two variables, as on a processor without AVX-512. Each kernel in both layouts. A
ratio is the time over torch's, as quartiles over rounds. What takes over `_SLOWER` times as long is
not raced.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import quantiles
from typing import Any

from provenance import provenance

from ucudnn.backends import open_backend
from ucudnn.benchmark.statistics import median_ns
from ucudnn.problem import OPS, Problem

_SLOWER, _MOST_BYTES = 6, 2 << 30
_PAIR = ((1, 1), (1, 1))
_HALF = {
    "pytorch#183815": Problem("fprop", 8, 16, 32, (112, 112), (7, 7), dilation=(2, 2)),
    "3x3": Problem("fprop", 8, 64, 64, (56, 56), (3, 3), padding=_PAIR),
    "1x1": Problem("fprop", 8, 64, 256, (56, 56), (1, 1)),
    "depthwise 3x3": Problem("fprop", 8, 64, 64, (56, 56), (3, 3), padding=_PAIR, groups=64),
    "3-D": Problem("fprop", 2, 16, 16, (24, 24, 24), (3, 3, 3), padding=((1, 1),) * 3),
    # Its dgrad is the forward pass of the transposed convolution, and its fprop the backward one.
    "transposed 4x4": Problem("fprop", 8, 32, 64, (56, 56), (4, 4), (2, 2), _PAIR),
}
_SPECIAL = {
    f"ConvNeXt-T, stage {stage}": Problem(
        "wgrad", 16, width, width, (size,) * 2, (7, 7), padding=((3, 3),) * 2, groups=width
    )
    for stage, width, size in ((1, 96, 56), (2, 192, 28), (3, 384, 14), (4, 768, 7))
}
# nnU-Net's full-resolution network, on patches of 64 instead of 128 voxels along each axis.
_SPECIAL |= {
    f"nnU-Net, encoder stage {stage}": Problem(
        "dgrad", 1, width, more, (size,) * 3, (3,) * 3, (2,) * 3, ((1, 1),) * 3
    )
    for stage, width, more, size in ((1, 32, 64, 64), (2, 64, 128, 32), (3, 128, 256, 16))
}
_SPECIAL |= {
    f"nnU-Net, transposed {stage}": Problem(
        "dgrad", 1, width, more, (size,) * 3, (2,) * 3, (2,) * 3
    )
    for stage, width, more, size in ((3, 128, 256, 16), (4, 64, 128, 32), (5, 32, 64, 64))
}


def main() -> None:
    """Time the kernels of one group."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("group", choices=("half", "special"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = list[dict[str, Any]]()
    kernels = list(_SPECIAL.items())
    if options.group == "half":
        pairs = product(_HALF.items(), OPS)
        kernels = [(name, replace(one, op=op, dtype="bfloat16")) for (name, one), op in pairs]
    for (name, problem), layout in product(kernels, ("nchw", "nhwc")):
        one = timed(replace(problem, layout=layout), options.rounds)
        found.append({"of": name, **one})
        ratios = ", ".join(f"{key} {ratio[1]:.2f}" for key, ratio in one["ratios"].items())
        print(f"{name}: {one['kernel']}, {one['torch_ns'] / 1e6:.1f} ms: {ratios}", flush=True)
        if options.out:
            document = {"provenance": provenance(), "kernels": found}
            options.out.write_text(json.dumps(document, indent=1) + "\n")


def timed(problem: Problem, rounds: int) -> dict[str, Any]:
    """One kernel by all algorithms: torch's time, and of the others the ratios to it."""
    backend = open_backend("torch_cpu")
    operands = backend.operands(problem, problem.batch)
    runs = {}
    for candidate in backend.candidates(problem):
        cost = backend.cost(problem, candidate.algorithm)
        if cost is not None and cost.workspace_bytes <= _MOST_BYTES:
            runs[candidate.algorithm] = backend.executable(problem, candidate.algorithm).alone

    def sample_ns(name: str) -> int:
        return backend.elapsed_ns(lambda: runs[name](*operands))

    # The first run of each prepares what later runs find.
    first = {name: min(sample_ns(name), sample_ns(name)) for name in runs}
    racing = [name for name in runs if first[name] <= _SLOWER * first["torch_default"]]
    times = [{name: sample_ns(name) for name in racing} for _ in range(rounds)]
    return {
        "kernel": str(problem),
        "torch": backend.implementation_of(problem, "torch_default"),
        "torch_ns": median_ns([one["torch_default"] for one in times]),
        "ratios": {
            name: [
                round(value, 3)
                for value in quantiles(one[name] / one["torch_default"] for one in times)
            ]
            for name in racing
            if name != "torch_default"
        },
    }


if __name__ == "__main__":
    main()
