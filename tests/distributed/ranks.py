"""What ranks run in tests: one function per test or two; each returns JSON values.

Those that train are in training.py.

Started by `launch` (forked, with a store in the test's process) or by torchrun.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ucudnn
from ucudnn import distributed
from ucudnn.backends import DeviceState
from ucudnn.distributed import Timeouts
from ucudnn.distributed.journal import Journal
from ucudnn.distributed.rendezvous import Rendezvous
from ucudnn.errors import UcudnnError
from ucudnn.measurement import Device, Measurement, Software
from ucudnn.problem import Problem

MIB = 1 << 20
MS = 1_000_000
LIMIT = 9 * MIB
KERNELS = 24


def problems(count: int = KERNELS, batch: int = 16) -> list[tuple[str, Problem]]:
    return [
        (f"layer{channels}", Problem("fprop", batch, channels, 2, (4, 4), (1, 1)))
        for channels in range(1, count + 1)
    ]


def load_file(name: str) -> Any:
    """A module of the tests by its path: no test folder is on sys.path."""
    path = Path(__file__).parents[1] / name
    spec = importlib.util.spec_from_file_location(name.replace("/", "_").removesuffix(".py"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def scripted(rank: int, pause_s: float = 0.0, **identity: Any) -> Any:
    """A backend with scripted costs and a noise of its own on every rank; it becomes ours.

    Torch's default is over the limit; of the twins noise alone decides which is faster.
    """
    module = load_file("tuning/conftest.py")
    twins = {
        name: lambda size: (int((0.2 + 1.0 * size) * MS), size * MIB) for name in ("left", "right")
    }
    backend = module.ScriptedBackend(
        {"torch_default": lambda size: (2 * size * MS, 2 * size * MIB), **twins}
    )
    chance = random.Random(rank)
    backend.disturbance = lambda: chance.uniform(0.98, 1.02)
    plain = backend.elapsed_ns

    backend.cpu_sets = set()

    def elapsed_ns(run: Callable[[], object]) -> int:
        backend.cpu_sets.add(tuple(sorted(os.sched_getaffinity(0))))
        time.sleep(pause_s)
        return plain(run)

    backend.elapsed_ns = elapsed_ns
    for name, value in identity.items():
        setattr(backend, name, lambda value=value: value)
    for module_name in ("backends", "tuning.tuner", "distributed.sharded", "distributed.agreement"):
        module = importlib.import_module(f"ucudnn.{module_name}")
        module.open_backend = lambda *_: backend
    return backend


class Counts:
    """What the last progress event said, and a sign on the disk when enough was measured."""

    def __init__(self, sign: Path | None = None, after: int = 0) -> None:
        self.measured = self.reused = 0
        self._sign, self._after = sign, after

    def __call__(self, event: Any) -> None:
        self.measured, self.reused = event.measured, event.reused
        if self._sign is not None and self.measured >= self._after:
            self._sign.touch()

    def result(self, plan: Any) -> dict[str, Any]:
        return {"measured": self.measured, "reused": self.reused, "hash": plan.hash}


def tune(
    folder: Path,
    rank: int,
    caches: list[str] | None = None,
    pause_s: float = 0.002,
    lease_s: float = 30.0,
    timeout_s: float = 120.0,
    sign_after: int = 0,
    limit: int = LIMIT,
    kernels: int = KERNELS,
    budget_s: float | None = None,
    sharing: int = 1,
    busy: Sequence[int] = (),
) -> dict[str, Any]:
    """Tune in all ranks, some of which may share a device as if by `ucudnn launch`.

    Ranks that are `busy` find other processes on their processors at any time.
    """
    ucudnn.config.share_device(sharing)
    backend = scripted(rank, pause_s)
    backend.state = lambda: DeviceState(float(rank in busy))
    counts = Counts(folder / f"measuring-{rank}" if sign_after else None, sign_after)
    cache = caches[rank] if caches else None
    config = ucudnn.Config(workspace_limit=limit, cache=cache, time_budget_s=budget_s)
    timeouts = Timeouts(timeout_s, lease_s)
    before = os.sched_getaffinity(0)
    plan = distributed.tune_problems(problems(kernels), config, None, counts, timeouts)
    assert os.sched_getaffinity(0) == before
    return {
        **counts.result(plan),
        "ran": len(backend.runs),
        "kernels": len(plan.kernels),
        "cpu_sets": list(backend.cpu_sets),
    }


def tune_and_die(folder: Path, rank: int) -> dict[str, Any]:
    """Tune in all ranks, of which one is killed the first time; before that they say how far."""
    backend = scripted(rank, 0.005)
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    counts, begun = Counts(), set[int]()

    def told(event: Any) -> None:
        finished = counts.measured
        counts(event)
        if not is_first or event.done in begun:
            return
        # another kernel begins: what was measured before this event belongs to finished ones
        begun.add(event.done)
        (folder / f"finished-{rank}").write_text(str(finished))
        if rank == 1 and len(begun) == 4:
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    config = ucudnn.Config(workspace_limit=LIMIT)
    plan = distributed.tune_problems(problems(), config, None, told, Timeouts(120, 5))
    return {**counts.result(plan), "ran": len(backend.runs)}


def tune_alone(folder: Path, rank: int) -> dict[str, Any]:
    """Tune without the others, in a cache of this rank."""
    scripted(rank)
    config = ucudnn.Config(workspace_limit=LIMIT, cache=str(folder / f"cache-{rank}"))
    counts = Counts()
    return counts.result(ucudnn.tuning.tuner.tune_problems(problems(), config, counts))


def tune_kinds(folder: Path, rank: int) -> dict[str, Any]:
    """Ranks 0 and 2 have one kind of device, 1 and 3 another, with other batches."""
    kind = rank % 2
    scripted(rank, 0.001, device=Device("cpu", f"kind {kind}", cores=1))
    counts = Counts()
    listed = problems(6, batch=16 - 4 * kind)
    config = ucudnn.Config(workspace_limit=LIMIT)
    plan = distributed.tune_problems(listed, config, None, counts, Timeouts(120))
    distributed.agree(plan)
    return {**counts.result(plan), "device": plan.device.name}


def tune_differently(folder: Path, rank: int, what: str) -> dict[str, Any]:
    """One rank is about to do something else."""
    odd = rank == dist.get_world_size() - 1
    listed = problems(4)
    identity: dict[str, Any] = {}
    config = ucudnn.Config(workspace_limit=LIMIT + (what == "limit" and odd))
    if odd and what == "version":
        identity["software"] = Software("1.0")
    if odd and what == "problem":
        listed[2] = ("layer3", listed[2][1].with_batch(8))
    scripted(rank, **identity)
    if odd and what == "ucudnn":
        importlib.import_module("ucudnn.distributed.agreement").own_version = lambda: "7.0"
    distributed.tune_problems(listed, config, None, None, Timeouts(120))
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


def measurements(first: int, count: int) -> list[Measurement]:
    """The same ones in every process; none are in two ranges that do not overlap."""
    laws = load_file("cache/laws.py")
    return laws.sample_measurements(20, seed=5)[first : first + count]


def keep_journal(folder: Path, rank: int, path: str, count: int) -> dict[str, Any]:
    """Put measurements, say so, and wait: this process is killed or told to go on."""
    with Rendezvous("test") as rendezvous, Journal(rendezvous, path) as journal:
        for measurement in measurements(rank * count, count):
            journal.cache.put([measurement])
        (folder / f"kept-{rank}").touch()
        while not (folder / "go on").exists():
            time.sleep(0.01)
    return {"peers": journal.peers}


def come_late(folder: Path, rank: int) -> dict[str, Any]:
    """The last rank never calls what the others call."""
    backend = scripted(rank)
    plan = ucudnn.Plan(
        (), backend.device(), backend.software(), backend.conditions(), ucudnn.Config(), "scripted"
    )
    if rank < dist.get_world_size() - 1:
        distributed.agree(plan, timeout_s=3)
    return {}


def restart(folder: Path, rank: int) -> dict[str, Any]:
    """Meet again and again about other plans; one rank comes before the invitation, one later."""
    backend = scripted(rank)
    made = backend.device(), backend.software(), backend.conditions()
    for number in range(10):
        plan = ucudnn.Plan((), *made, ucudnn.Config(workspace_limit=number), "scripted")
        time.sleep((0.1, 0, 0.2)[rank])
        distributed.agree(plan, timeout_s=60)
    return {"met": number}


def share(folder: Path, rank: int, times: list[list[int | None]], batch: int) -> dict[str, Any]:
    """Share a batch."""
    shares = distributed.share(times[rank], batch + (batch < 0) * rank, timeout_s=60)
    return {"sizes": shares.sizes, "time_ns": shares.time_ns, "index": shares.index}


def main(
    function: str, folder: Path, arguments: dict[str, Any], is_store_in_rank_0: bool = False
) -> None:
    """Run one function and write what it returns, or the sentence that it ended with."""
    rank = dist.get_rank()
    try:
        chosen = globals().get(function)
        if chosen is None:
            chosen = getattr(load_file("distributed/training.py"), function)
        said = chosen(folder, rank, **arguments)
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
