"""Real ranks for tests: processes forked from a server that has torch loaded, or torchrun's."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ucudnn.distributed import rendezvous
from ucudnn.errors import UcudnnError

RANKS = Path(__file__).with_name("ranks.py")
# A machine that is busy with other work takes several times as long as an idle one.
PATIENCE_S = 240


@dataclass
class Job:
    """Ranks at work on one function of ranks.py, and what each of them returned.

    Args:
        folder: where ranks say how far they are.
        processes: by rank.
    """

    folder: Path
    processes: list[Any] = field(default_factory=list)

    def said(self, rank: int) -> dict[str, Any] | None:
        """What a rank returned, None where it did not end so."""
        path = self.folder / f"{rank}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        os.kill(self.processes[rank].pid, number)

    def end(self, *ranks: int) -> list[dict[str, Any]]:
        """What these ranks returned, when they have ended; all, unless told otherwise."""
        chosen = ranks or range(len(self.processes))
        for rank in chosen:
            self.processes[rank].join(PATIENCE_S)
            assert self.processes[rank].exitcode == 0, f"rank {rank}: see its output"
        return [self.said(rank) or {} for rank in chosen]


Launch = Callable[..., Job]


@pytest.fixture(scope="session")
def server() -> Any:
    """A process that has loaded torch and used none of it: what it forks starts in no time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "ucudnn.distributed", "h5py"])
    return context


@pytest.fixture
def launch(server: Any, tmp_path: Path) -> Iterator[Launch]:
    """Start ranks that run a function of ranks.py; the store is in this process, as in an agent."""
    started: list[Job] = []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(function: str, ranks: int, **arguments: Any) -> Job:
        job = Job(tmp_path / f"job-{len(started)}")
        job.folder.mkdir()
        started.append(job)
        for rank in range(ranks):
            given = {
                "FUNCTION": function,
                "ARGUMENTS": arguments,
                "RANK": rank,
                "WORLD_SIZE": ranks,
                "PORT": store.port,
                "NAME": f"{tmp_path.name}-{len(started)}",
                "FOLDER": str(job.folder),
                "CACHE": os.environ["UCUDNN_CACHE"],
            }
            process = server.Process(target=runpy.run_path, args=(str(RANKS), given, "__rank__"))
            process.start()
            job.processes.append(process)
        return job

    yield start
    for job in started:
        for process in job.processes:
            if process.is_alive():
                process.kill()
            process.join()


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[int, Any]]:
    """Call a function with the number of a rank in one thread for each; they share a store.

    Every call stands for a job that was started again: the store keeps what earlier calls wrote. A
    group is a tuple of ranks. An error of ours is returned like a result.
    """
    here = threading.local()
    store = HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: here.rank)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group or here.ranks)
    monkeypatch.setattr(rendezvous, "_get_default_store", lambda: store)

    def run(
        function: Callable[[int], Any], world: Sequence[int], absent: Sequence[int] = ()
    ) -> dict[int, Any]:
        def as_rank(rank: int) -> Any:
            here.rank, here.ranks = rank, tuple(world)
            try:
                return function(rank)
            except UcudnnError as error:
                return error

        present = [rank for rank in world if rank not in absent]
        with ThreadPoolExecutor(len(present)) as pool:
            return dict(zip(present, pool.map(as_rank, present), strict=True))

    return run


@pytest.fixture
def torchrun(package: Path) -> Callable[..., tuple[int, str]]:
    """Run a script of this folder under torchrun until it ends; exit status and output."""

    def run(
        script: str, ranks: int, *words: object, options: Sequence[str] = (), **variables: str
    ) -> tuple[int, str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
        path = f"{package.parent}{os.pathsep}{RANKS.parents[1] / 'pure'}"
        ended = subprocess.run(
            [*command, f"--nproc-per-node={ranks}", RANKS.with_name(script), *map(str, words)],
            check=False,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": path, **variables},
            text=True,
            timeout=PATIENCE_S,
        )
        return ended.returncode, ended.stdout + ended.stderr

    return run


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
