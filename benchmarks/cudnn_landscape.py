"""What a workspace limit costs on a GPU, told by cuDNN's heuristics alone: no GPU, no times.

Prints, for a device profile: AlexNet's conv2 in float32 NCHW by engine and micro-batch, and for
nnU-Net's 3-D layers at N=2 where a batch of one, and where slabs along depth, keep the tensor cores
within 64 MiB that the whole kernel cannot.

Usage: python benchmarks/cudnn_landscape.py [PROFILE.json]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ucudnn.backends.cudnn.graph import Views, views_of
from ucudnn.backends.cudnn.offline import Listing, list_configurations
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.layer_table import read_rows
from ucudnn.problem import OPS, Problem
from ucudnn.slabs import row_count, slab

HERE = Path(__file__).parent
LIMIT = 64 << 20
MIB = 1 << 20
BATCHES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
WIDE_SLABS = (8, 16, 32)
ALL_SLABS = (2, 4, *WIDE_SLABS)
ALEXNET_CONV2 = Problem(
    "fprop", 256, 64, 192, (27, 27), (5, 5), padding=((2, 2), (2, 2)), math="tf32"
)
TENSOR_CORE = "TENSOR_CORE"


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else HERE / "devices" / "h200.json"
    profile = DeviceProfile.load(path)
    print(f"{profile.name}; nothing here was run, and no number is a time.\n")
    for op in OPS:
        print_workspaces(op, profile)
    for dtype in ("float32", "float16"):
        for op in OPS:
            print_splits(op, dtype, profile)


def print_workspaces(op: str, profile: DeviceProfile) -> None:
    """Smallest workspace in MiB by engine and batch; the engines of tensor cores are starred."""
    problems = [replace(ALEXNET_CONV2, op=op, batch=batch) for batch in BATCHES]
    listings = list(list_configurations(problems, profile))
    smallest: dict[str, dict[int, float]] = {}
    for listing in listings:
        for one in listing.configurations:
            engine = one.identity.partition("_")[0] + ("*" if TENSOR_CORE in one.notes else "")
            row = smallest.setdefault(engine, {})
            mib = one.workspace_bytes / MIB
            row[listing.problem.batch] = min(mib, row.get(listing.problem.batch, mib))
    print(f"{problems[0]}, cuDNN {listings[0].cudnn_version}: least workspace in MiB")
    print(f"{'engine':>8}" + "".join(f"{batch:>8}" for batch in BATCHES))
    for engine, row in smallest.items():
        cells = (f"{row[batch]:8.1f}" if batch in row else " " * 8 for batch in BATCHES)
        print(f"{engine:>8}" + "".join(cells))
    print()


def print_splits(op: str, dtype: str, profile: DeviceProfile) -> None:
    """How many oversized kernels keep the tensor cores at N=1, and how many in slabs."""
    kernels = distinct_kernels("nnunet_3d_fullres_n2.csv", op, dtype)
    oversized = [
        listing.problem
        for listing in list_configurations(kernels, profile)
        if uses_tensor_cores(listing) and not fits(listing)
    ]
    singles = [kernel.with_batch(1) for kernel in oversized]
    by_batch = sum(map(fits, list_configurations(singles, profile)))
    print(
        f"nnU-Net 3-D {dtype} NCDHW {op}: {len(oversized)} of {len(kernels)} kernels need more "
        f"than {LIMIT // MIB} MiB for any tensor core; N=1 keeps one in {by_batch}"
    )
    for rows in (WIDE_SLABS, ALL_SLABS):
        print(
            f"  slabs of {rows[0]} to {rows[-1]} planes: in "
            f"{count_fitting_slabs(oversized, rows, profile)} at N=2, in "
            f"{count_fitting_slabs(singles, rows, profile)} at N=1"
        )


def distinct_kernels(table: str, op: str, dtype: str) -> list[Problem]:
    """The problems of a table of layers, each once."""
    rows = read_rows(HERE / "layers" / table, (op,), dtype)
    return list(dict.fromkeys(replace(row.problem, math="tf32") for row in rows))


def count_fitting_slabs(
    kernels: Sequence[Problem], sizes: Sequence[int], profile: DeviceProfile
) -> int:
    """How many kernels have a slab size, of these, at which every slab fits."""
    views: dict[Problem, Views] = {}
    parts: dict[Problem, list[list[Problem]]] = {}
    for kernel in kernels:
        parts[kernel] = [cut(kernel, rows, views) for rows in sizes if rows < row_count(kernel)]
    fitting = {
        listing.problem: fits(listing)
        for listing in list_configurations(list(views), profile, views=views)
    }
    return sum(
        any(all(fitting[part] for part in cuts) for cuts in by_rows) for by_rows in parts.values()
    )


def cut(kernel: Problem, rows: int, views: dict[Problem, Views]) -> list[Problem]:
    """The distinct slabs of a kernel cut every so many rows; their views are added."""
    total = row_count(kernel)
    starts: Iterable[int] = range(0, total, rows)
    found = [slab(kernel, begin, min(begin + rows, total)).problem for begin in starts]
    parts = [part for part in dict.fromkeys(found) if part is not None]
    views.update((part, views_of(part, kernel)) for part in parts)
    return parts


def uses_tensor_cores(listing: Listing) -> bool:
    return any(TENSOR_CORE in one.notes for one in listing.configurations)


def fits(listing: Listing) -> bool:
    """Whether a tensor-core configuration stays within the limit."""
    return any(
        TENSOR_CORE in one.notes and one.workspace_bytes <= LIMIT for one in listing.configurations
    )


if __name__ == "__main__":
    main()
