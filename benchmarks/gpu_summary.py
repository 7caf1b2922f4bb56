"""Say in some lines what the results of a GPU won, what they lost and what was not run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

from step_workers import Run, compare, fastest
from step_workers import load as load_steps

# what a whole set of results consists of
FILES = {
    "tests.txt": "tests on the GPU (pytest tests/gpu)",
    "splits.csv": "tables of kernels (gpu_suite.py --parts timings)",
    "plan_64mib.json": "plans of layers (gpu_suite.py --parts tune)",
    "training_steps.json": "training steps (training_steps.py)",
    "demo_unet.json": "demonstration A (demo_unet.py)",
    "demo_memory.json": "demonstration B (demo_memory.py)",
    "demo_cold_start.json": "demonstration C (demo_cold_start.py)",
    "l2_hypothesis.json": "the L2 hypothesis (l2_hypothesis.py)",
}
STEPS = ("unet3d", "resnet50")


class AnyGain(Protocol):
    """A ratio of times that can tell whether it is a gain."""

    def is_won(self, least: float) -> bool:
        """Faster beyond doubt."""

    def is_lost(self, least: float) -> bool:
        """Slower beyond doubt."""


def summary(
    folder: Path,
    device: str,
    gains: Mapping[tuple[str, int], Sequence[Sequence[AnyGain | None]]],
    least: float,
) -> Iterator[str]:
    """The last section of the page.

    Args:
        folder: of the results.
        device: its name.
        gains: by dtype and limit in MiB, for each of the three baselines the gains of all layers.
        least: the least gain that counts.
    """
    yield f"## Won, lost, not run on {device}\n"
    for (dtype, limit), by_baseline in gains.items():
        said = ", ".join(
            f"{name} {_count(found, least)}"
            for name, found in zip(
                ("the best undivided", "torch's default", "cudnn.benchmark"),
                by_baseline,
                strict=True,
            )
        )
        yield f"- kernels, {dtype}, {limit} MiB, splits against {said}"
    runs = load_steps(folder / "training_steps.json")
    runs.sort(key=lambda run: run.job.case)
    for case, members in groupby(runs, lambda run: run.job.case):
        yield f"- steps of {case[0]}, {case[1]}, N={case[2]}: {_step(list(members))}"
    yield from (f"- not run: {one}" for one in missing(folder, {run.job.network for run in runs}))


def _count(gains: Sequence[AnyGain | None], least: float) -> str:
    """Numbers of layers."""
    known = [gain for gain in gains if gain is not None]
    won = sum(gain.is_won(least) for gain in known)
    lost = sum(gain.is_lost(least) for gain in known)
    alone = f", {len(gains) - len(known)} where nothing undivided fits" if known != gains else ""
    return f"{won} won, {lost} lost, {len(known) - won - lost} equal{alone}"


def _step(runs: Sequence[Run]) -> str:
    """The fastest of ours against the fastest of the others."""
    own, rival = fastest(runs, ours=True), fastest(runs, ours=False)
    if own is None or rival is None:
        return f"not decided, {'ucudnn' if own is None else 'torch'} took no step"
    ratio, low, high = compare(rival, own)
    says = "won" if low > 1 else "lost" if high < 1 else "undecided"
    return (
        f"{says}: {own.job.variant} is {ratio:.2f} times as fast as {rival.job.variant} "
        f"(95 % interval {low:.2f} to {high:.2f})"
    )


def missing(folder: Path, networks: set[str]) -> Iterator[str]:
    """Name the parts of a whole set of results that these lack."""
    yield from (what for name, what in FILES.items() if not (folder / name).exists())
    if networks:
        yield from (f"steps of {name}" for name in STEPS if name not in networks)
    path = folder / "answers.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for group, count in found.get("not_reached", {}).items():
        yield f"{count} kernels of {group}, for want of time"
    path = folder / "faults.json"
    for fault in json.loads(path.read_text()) if path.exists() else ():
        yield f"{fault}: it faulted or hung"
