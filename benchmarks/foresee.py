"""Training steps foreseen on fake tensors, beside real ones: their peaks and their times.

    python benchmarks/foresee.py --out foresee.json                        # all, half an hour
    python benchmarks/foresee.py detr vnet --settings keep,autocast

Each network and setting has a process of its own. The real peak is that of a second step, with
what the first one left behind; both are counted by torch's allocator, with parameters and inputs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import torch
from foresee_networks import NETWORKS, example
from provenance import provenance
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.backends.tensors import in_channels_last
from ucudnn.errors import UcudnnError, first_line
from ucudnn.steps.run import MODEL_ERRORS, run_step

SETTINGS = ("keep", "channels_last", "autocast")
STEPS = 3
# Steps of at least this time are counted apart from shorter ones.
LONG_NS = 200_000_000


class Autocast(nn.Module):
    """A model whose forward is computed in bfloat16 where autocast does so."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(*args, **kwargs)


def set_up(name: str, setting: str) -> tuple[nn.Module, Any]:
    """A network and its inputs, in a setting."""
    model, inputs = example(name)
    if setting == "autocast":
        model = Autocast(model)
    elif setting == "channels_last":
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data = in_channels_last(tensor.data)
        inputs = tree_map_only(Tensor, in_channels_last, inputs)
    return model, inputs


def foreseen(model: nn.Module, inputs: Any) -> tuple[int, int]:
    """The peak of a step in bytes, parameters and inputs included, and its time in ns."""
    found = ucudnn.foresee(model, inputs)
    return found.peak_bytes, found.time_ns


def step(model: nn.Module, inputs: Any) -> None:
    """Forward, the loss that is foreseen, and backward."""
    model.zero_grad()
    torch.manual_seed(0)  # which layers are dropped is drawn
    run_step(model, inputs)


def real(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """The peaks of a first and a second step, and times of further ones, as JSON values."""
    backend = open_backend("torch_cpu")

    def run() -> None:
        step(model, inputs)
        model.zero_grad()

    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
    storages = [one.untyped_storage() for one in tensors if isinstance(one, Tensor)]
    held = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
    first, second = (backend.span(run) for _ in range(2))
    return {
        "first_peak_bytes": held + first.peak_bytes,
        "peak_bytes": held + first.end_bytes + second.peak_bytes,
        "samples_ns": [backend.elapsed_ns(partial(step, model, inputs)) for _ in range(STEPS)],
    }


def judged(name: str, setting: str) -> dict[str, Any]:
    """What was foreseen of a network, and what is, as JSON values."""
    torch.set_num_threads(1)
    row: dict[str, Any] = {"network": name, "setting": setting}
    model, inputs = set_up(name, setting)
    began = time.monotonic()
    try:
        row["foreseen_peak_bytes"], row["foreseen_ns"] = foreseen(model, inputs)
    except (*MODEL_ERRORS, UcudnnError) as error:
        row["refused"] = f"{type(error).__name__}: {first_line(error)}"
    row["foresight_s"] = round(time.monotonic() - began, 2)
    return {**row, **real(model, inputs)}


def in_a_process(name: str, setting: str) -> dict[str, Any]:
    """The row of a network in a process of its own, which fake tensors may abort."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        try:
            return own.submit(judged, name, setting).result()
        except BrokenProcessPool:
            return {"network": name, "setting": setting, "refused": "the process was aborted"}


def errors(row: dict[str, Any]) -> tuple[float, float]:
    """By how much of the real ones the foreseen peak and time are too high."""
    median_ns = statistics.median(row["samples_ns"])
    return row["foreseen_peak_bytes"] / row["peak_bytes"] - 1, row["foreseen_ns"] / median_ns - 1


def described(row: dict[str, Any]) -> str:
    """One line for a person."""
    line = f"{row['network']:22} {row['setting']:13}"
    if "peak_bytes" in row:
        median_ns = statistics.median(row["samples_ns"])
        line += f" {row['peak_bytes'] / 2**20:7.1f} MiB {median_ns / 1e6:7.0f} ms"
    if "refused" in row:
        return f"{line} {row['refused']}"
    peak_error, time_error = errors(row)
    return f"{line} {peak_error:+9.4%} {time_error:+5.0%} in {row['foresight_s']:.1f} s"


def summary(rows: list[dict[str, Any]]) -> str:
    """How many peaks and times are near, for a person."""
    rows = [row for row in rows if "refused" not in row]
    near = sum(abs(errors(row)[0]) <= 0.001 for row in rows)
    lines = [f"{near} of {len(rows)} peaks are within 0.1 %"]
    for kind, is_meant in (("at least", True), ("less than", False)):
        times = [
            errors(row)[1]
            for row in rows
            if (statistics.median(row["samples_ns"]) >= LONG_NS) == is_meant
        ]
        near = sum(abs(one) <= 0.15 for one in times)
        lines.append(
            f"{near} of {len(times)} times of steps of {kind} {LONG_NS / 1e9} s are within 15 %"
            + (f" (median {statistics.median(times):+.0%})" if times else "")
        )
    took = [row["foresight_s"] for row in rows]
    if took:
        median = statistics.median(took)
        lines.append(f"a network took {min(took)} to {max(took)} s, {median:.1f} s in the median")
    return "\n".join(lines)


def main() -> None:
    """Judge foresight on the networks, and write what was found after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help="default: all")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="default: %(default)s")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    settings = arguments.settings.split(",")
    for known, given in ((NETWORKS, arguments.networks), (SETTINGS, settings)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not of {', '.join(known)}")
    torch.set_num_threads(1)
    made, rows = provenance(), list[dict[str, Any]]()
    for name in arguments.networks or NETWORKS:
        for setting in settings:
            rows.append(in_a_process(name, setting))
            print(described(rows[-1]), flush=True)
            if arguments.out is not None:
                found = {"rows": rows, "made": made}
                arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(summary(rows))


if __name__ == "__main__":
    main()
