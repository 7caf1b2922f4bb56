"""What ranks run in tests: one function per test or two; each returns JSON values.

Those that train are in training.py.

Started by `launch` (forked, with a store in the test's process) or by torchrun.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fakes import ScriptedBackend
from torch import Tensor, nn

import ucudnn
from ucudnn import cache as caches
from ucudnn import distributed
from ucudnn.distributed.rendezvous import Rendezvous
from ucudnn.errors import BusyError, UcudnnError
from ucudnn.measurement import Device, Software

MIB = 1 << 20
MS = 1_000_000
LIMIT = 9 * MIB


class Wide(nn.Module):
    """Convolutions side by side, each of another geometry."""

    def __init__(self, kernels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(1 + n, 2, 1, bias=False) for n in range(kernels))

    def forward(self, images: Tensor) -> Tensor:
        return sum(layer(images[:, : 1 + n]) for n, layer in enumerate(self.layers))


def network(kernels: int = 12, batch: int = 16) -> tuple[nn.Module, Tensor]:
    return Wide(kernels), torch.ones(batch, kernels, 4, 4)


def scripted(rank: int, pause_s: float = 0.0, **identity: Any) -> Any:
    """A backend with scripted costs and a noise of its own on every rank; it becomes ours.

    Torch's default is over the limit; of the twins noise alone decides which is faster.
    """
    twins = {
        name: lambda size: (int((0.2 + 1.0 * size) * MS), size * MIB) for name in ("left", "right")
    }
    backend = ScriptedBackend(
        {"torch_default": lambda size: (2 * size * MS, 2 * size * MIB), **twins}
    )
    chance = random.Random(rank)
    backend.disturbance = lambda: chance.uniform(0.98, 1.02)
    plain = backend.elapsed_ns

    def elapsed_ns(run: Callable[[], object]) -> int:
        time.sleep(pause_s)
        return plain(run)

    backend.elapsed_ns = elapsed_ns
    for name, value in identity.items():
        setattr(backend, name, lambda value=value: value)
    for module_name in ("backends", "kernels.tune", "distributed.tuning"):
        importlib.import_module(f"ucudnn.{module_name}").open_backend = lambda *_: backend
    agreement = importlib.import_module("ucudnn.distributed.agreement")
    agreement.identify = lambda *_: (backend.device(), backend.software())
    return backend


class Counts:
    """Candidates that a rank has measured, over all the tunings of which it is told."""

    def __init__(self) -> None:
        self._before = self._now = 0

    def __call__(self, event: Any) -> None:
        # each tuning counts from 0
        if event.measured < self._now:
            self._before += self._now
        self._now = event.measured

    @property
    def measured(self) -> int:
        return self._before + self._now


def settings(**given: Any) -> ucudnn.Config:
    """That no noise changes what is measured, and no step is run."""
    fixed = {"workspace_limit": LIMIT, "ops": ("fprop",), "effort": "thorough"}
    return ucudnn.Config(**(fixed | {"step_race": False} | given))


def tune(folder: Path, rank: int, places: list[str] | None = None, **given: Any) -> dict[str, Any]:
    """Tune in all ranks, with one cache for all or one for each, and then in one process."""
    backend, counts, alone = scripted(rank), Counts(), Counts()
    config = settings(cache=places[rank] if places else None, **given)
    plan = distributed.tune(*network(), config, None, counts, timeout_s=60)
    dist.barrier()
    ran = len(backend.runs)
    second = ucudnn.tune(*network(), config, alone) if rank == 0 else plan
    return {
        "measured": counts.measured,
        "ran": ran,
        "hash": plan.hash,
        "of one process": [second.hash, alone.measured],
        "document": plan.to_dict(),
    }


def tune_alone(folder: Path, rank: int) -> dict[str, Any]:
    """Tune without the others, in a cache of this rank."""
    scripted(rank)
    counts = Counts()
    plan = ucudnn.tune(*network(), settings(cache=str(folder / f"cache-{rank}")), counts)
    return {"measured": counts.measured, "hash": plan.hash}


def tune_whole(folder: Path, rank: int, **given: Any) -> dict[str, Any]:
    """Tune a network on this machine in all ranks."""
    convolutions = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)
    model, images = nn.Sequential(*convolutions), torch.randn(4, 3, 24, 24)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = distributed.tune(model, images, ucudnn.Config(**given), timeout_s=100)
    layouts = plan.layout_race
    return {
        "document": plan.to_dict(),
        "kernels": len(plan.kernels),
        "left out": len(plan.left_out),
        "budget": plan.origin.budget,
        "set": plan.config.time_budget_s,
        "ways": [one.time_ns for one in layouts.ways] if layouts else [],
        "peak": plan.memory.plan_peak_bytes if plan.memory else 0,
        "rounds": layouts.rounds if layouts else 0,
        "warned": [str(one.message) for one in caught if one.category.__name__ != "NoiseWarning"],
    }


def tune_and_die(folder: Path, rank: int) -> dict[str, Any]:
    """Tune in all ranks, of which one is killed the first time; before that it says how far."""
    scripted(rank, 0.005)
    counts, is_first = Counts(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def told(event: Any) -> None:
        counts(event)
        if is_first and rank == 1 and event.done == 3:
            with caches.open(None, "r") as cache:
                (folder / "kept").write_text(str(len(cache)))
            os.kill(os.getpid(), signal.SIGKILL)

    plan = distributed.tune(*network(), settings(), None, told, timeout_s=60)
    return {"measured": counts.measured, "hash": plan.hash}


def tune_busy(folder: Path, rank: int) -> dict[str, Any]:
    """The last rank cannot measure."""
    backend = scripted(rank)

    def elapsed_ns(run: Callable[[], object]) -> int:
        raise BusyError("the profiler is in use")

    if rank == dist.get_world_size() - 1:
        backend.elapsed_ns = elapsed_ns
    distributed.tune(*network(), settings(), timeout_s=60)
    return {}


def tune_kinds(folder: Path, rank: int) -> dict[str, Any]:
    """Ranks 0 and 2 have one kind of device, 1 and 3 another, with other batches."""
    kind = rank % 2
    scripted(rank, device=Device("cpu", f"kind {kind}", cores=1))
    counts = Counts()
    plan = distributed.tune(*network(6, 16 - 4 * kind), settings(), None, counts, timeout_s=60)
    distributed.agree(plan)
    return {"measured": counts.measured, "hash": plan.hash, "device": plan.device.name}


def tune_differently(folder: Path, rank: int, what: str) -> dict[str, Any]:
    """One rank is about to do something else."""
    odd = rank == dist.get_world_size() - 1
    identity: dict[str, Any] = {}
    if odd and what == "version":
        identity["software"] = Software("1.0")
    scripted(rank, **identity)
    if odd and what == "ucudnn":
        ucudnn.__version__ = "7.0"
    model, images = network(4, 8 if odd and what == "problem" else 16)
    config = settings(workspace_limit=LIMIT + (what == "limit" and odd))
    distributed.tune(model, images, config, timeout_s=60)
    return {}


def agree(folder: Path, rank: int, paths: list[str], how: str, what: str = "") -> dict[str, Any]:
    """Load a plan by one of three ways, and follow it; on the last rank something is odd."""
    odd = rank == dist.get_world_size() - 1
    identity = {"software": Software("1.0")} if odd and what == "version" else {}
    if what == "kinds":
        identity["device"] = Device("cpu", f"kind {rank % 2}")
    scripted(rank, **identity)
    if how == "load":
        plan = distributed.load(paths[rank], timeout_s=60)
    elif how == "send":
        plan = distributed.load(paths, src=0, timeout_s=60)
    elif how == "broadcast":
        plan = ucudnn.Plan.load(paths[0]) if rank == 0 and what != "none" else None
        plan = distributed.broadcast(plan, timeout_s=60)
    else:
        plan = distributed.agree(ucudnn.Plan.load(paths[rank]), timeout_s=60)
    return {"hash": plan.hash, "device": plan.device.name}


def die_after_meeting(folder: Path, rank: int) -> dict[str, Any]:
    """Rank 1 is killed between the rendezvous and the exchange."""
    with Rendezvous("test", None, timeout_s=20) as rendezvous:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return rendezvous.exchange("values", rank)


def main(
    function: str, folder: Path, arguments: dict[str, Any], is_store_in_rank_0: bool = False
) -> None:
    """Run one function and write what it returns, or the sentence that it ended with."""
    rank = dist.get_rank()
    try:
        found = globals()
        for name in ("training", "communicating"):
            if function not in found:
                found = vars(importlib.import_module(name))
        said = found[function](folder, rank, **arguments)
    except UcudnnError as error:
        said = {"error": type(error).__name__, "sentence": str(error)}
        said["ranks"] = list(getattr(error, "ranks", ()))
    temporary = folder / f"{rank}.new"
    temporary.write_text(json.dumps(said))
    temporary.rename(folder / f"{rank}.json")
    if is_store_in_rank_0 and "sentence" not in said:
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo that still hold Python objects may abort a normal exit (pytorch#179291).
    os._exit(0)


if __name__ == "__rank__":
    given = globals()
    os.environ["UCUDNN_CACHE"] = given["CACHE"]
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", given["PORT"], is_master=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(given["NAME"], store),
        rank=given["RANK"],
        world_size=given["WORLD_SIZE"],
        timeout=timedelta(seconds=200),
    )
    main(given["FUNCTION"], Path(given["FOLDER"]), given["ARGUMENTS"])

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), is_store_in_rank_0=True)
