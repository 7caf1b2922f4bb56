"""`distributed.init` by the variables of torchrun, Open MPI, MPICH and Slurm: the same job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from ucudnn import distributed
from ucudnn.distributed import startup
from ucudnn.errors import RankError

pytestmark = pytest.mark.nightly
STARTED = Path(__file__).with_name("started.py")
PATIENCE_S = 240
# Rank, size, number on the host, ranks on the host.
VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def variables(launcher: str, *numbers: int) -> dict[str, str]:
    return dict(zip(VARIABLES[launcher], map(str, numbers), strict=False))


@pytest.fixture
def started():
    """Set variables as a launcher does; those that `init` sets are gone after the test."""
    with patch.dict(os.environ):
        for name in (*chain(*VARIABLES.values()), "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        yield os.environ.update


def said(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank of started.py wrote."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("launcher", ["Open MPI", "MPICH", "Slurm"])
def test_ranks_of_one_host_find_each_other_and_learn_as_under_torchrun(
    tmp_path, package, torchrun, launcher
):
    """Started by this process, with the variables of a launcher that need not be here."""
    torchrun("started.py", 2, tmp_path)
    expected = said(tmp_path, 2)
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    ranks = [
        subprocess.Popen(
            [sys.executable, STARTED, tmp_path],
            env={**environment, **variables(launcher, rank, 2, rank, 2)},
        )
        for rank in range(2)
    ]
    assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0]
    found = said(tmp_path, 2)
    assert [one["rank"] for one in found] == [[0, 2, 0], [1, 2, 1]]
    # Gloo adds in the same order whoever has started the ranks: equal to the last bit.
    assert {one["weights"] for one in [*found, *expected]} == {expected[0]["weights"]}


def test_a_restart_meets_no_dead_rank(tmp_path, torchrun):
    """Gloo fails with the keys of dead ranks, which torchrun's store keeps over restarts."""
    options = ["--max-restarts=1"]
    status, output = torchrun("started.py", 2, tmp_path, "die once", options=options)
    assert status == 0, output
    assert [one["attempt"] for one in said(tmp_path, 2)] == ["1", "1"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (variables("MPICH", 7, 8, 3, 4), (7, 8, 3, 4)),
        # mpirun in a batch job of Slurm
        (variables("Slurm", 0, 16, 0, 16) | variables("Open MPI", 3, 4, 3, 4), (3, 4, 3, 4)),
        # torchrun under mpirun, once per host
        (variables("torchrun", 5, 8, 1, 4) | variables("Open MPI", 1, 2, 0, 1), (5, 8, 1, 4)),
        # srun with PMI
        (variables("Slurm", 7, 8, 3, 4) | {"PMI_RANK": "7", "PMI_SIZE": "8"}, (7, 8, 3, 4)),
        # srun on two hosts, and on one more with fewer tasks
        (variables("Slurm", 7, 11, 3) | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, (7, 11, 3, 4)),
        # srun of a part of a batch job
        (variables("Slurm", 1, 16, 1, 2) | {"SLURM_STEP_NUM_TASKS": "2"}, (1, 2, 1, 2)),
    ],
)
def test_the_launcher_nearest_to_the_rank_counts(started, environment, expected):
    started(environment)
    assert startup._read() == expected


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"PMI_RANK": "1"}, "a rank must know its number .* got PMI_RANK=1, PMI_SIZE=None"),
        (variables("torchrun", 4, 4, 0, 4), "RANK=4, WORLD_SIZE=4"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one, WORLD_SIZE=2"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_LOCALID=None"),
        (variables("torchrun", 0, 2, 0, 2) | {"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT"),
    ],
)
def test_variables_that_make_no_job_are_refused(started, environment, sentence):
    started(environment)
    with pytest.raises(RankError, match=sentence):
        distributed.init(timeout_s=0.2)


def test_the_mpiexec_of_another_mpi_is_detected(started, monkeypatch):
    """The MPI library that is loaded sees a job of one rank."""
    started(variables("MPICH", 1, 2, 1, 2))
    world = SimpleNamespace(rank=0, size=1)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(COMM_WORLD=world))
    with pytest.raises(RankError, match="rank 1 of 2 for its launcher, but rank 0 of 1 for mpi4py"):
        distributed.init()


def test_ranks_on_several_hosts_need_an_address(started, monkeypatch):
    started(variables("Open MPI", 1, 4, 1, 2))
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RankError, match="set MASTER_ADDR and MASTER_PORT for all of them"):
        distributed.init()


def test_a_rank_that_nobody_joins_ends_with_a_sentence(started):
    started(variables("MPICH", 0, 2, 0, 2))
    with pytest.raises(RankError, match="rank 0 of 2 did not reach the others within 0.2"):
        distributed.init(timeout_s=0.2)
