"""`distributed.init` under torchrun, Open MPI, MPICH and Slurm's variables: the same job."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ucudnn import distributed
from ucudnn.distributed import launchers
from ucudnn.distributed.launchers import Launched, read_launcher, slurm_address
from ucudnn.errors import RankError

pytestmark = pytest.mark.nightly
STARTED = Path(__file__).with_name("started.py")
PATIENCE_S = 240
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def find_mpi(name: str) -> str | None:
    """The mpiexec of an MPI: beside Python, as its wheel installs it, or on the PATH."""
    folders = [str(Path(sys.executable).parent), *os.environ["PATH"].split(os.pathsep)]
    for program in ("mpirun", "mpiexec"):
        for folder in folders:
            found = shutil.which(program, path=folder)
            if found is not None:
                version = subprocess.run([found, "--version"], capture_output=True, check=False)
                if name.encode() in version.stdout:
                    return found
    return None


OPEN_MPI, MPICH = find_mpi("Open MPI"), find_mpi("HYDRA")
needs_open_mpi = pytest.mark.skipif(OPEN_MPI is None, reason="Open MPI is not installed")
needs_mpich = pytest.mark.skipif(MPICH is None, reason="MPICH is not installed")
LAUNCHERS = [
    pytest.param("Open MPI", marks=needs_open_mpi),
    pytest.param("MPICH", marks=needs_mpich),
]


def command(launcher: str, ranks: int) -> list[str]:
    if launcher == "torchrun":
        return [*TORCHRUN, f"--nproc-per-node={ranks}"]
    if launcher == "MPICH":
        return [str(MPICH), "-n", str(ranks), sys.executable]
    options = ["--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    return [str(OPEN_MPI), "--allow-run-as-root", *options, sys.executable]


@pytest.fixture
def start(tmp_path: Path, package: Path):
    """Run started.py in ranks; exit status, output, and what each rank wrote."""
    return starter(tmp_path, package)


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory, package: Path):
    """What ranks under torchrun write, by their number; each number is run once."""
    start = starter(tmp_path_factory.mktemp("torchrun"), package)
    return cache(lambda ranks: start(command("torchrun", ranks)))


def starter(tmp_path: Path, package: Path):
    def run(words: list[str], what: str = "", **variables: str):
        folder = tmp_path / f"job-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        paths = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
        environment["TMPDIR"] = str(folder)
        ended = subprocess.run(
            [*words, str(STARTED), str(folder), what],
            check=False,
            capture_output=True,
            env=environment,
            timeout=PATIENCE_S,
        )
        # Open MPI's mpirun may put NUL bytes into its output.
        output = (ended.stdout + ended.stderr).replace(b"\0", b"").decode(errors="replace")
        said = [json.loads(path.read_text()) for path in sorted(folder.glob("?.json"))]
        return ended.returncode, output, said

    return run


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_mpi_gives_the_weights_of_torchrun(start, by_torchrun, launcher, ranks):
    expected = by_torchrun(ranks)
    found = start(command(launcher, ranks))
    for status, output, said in (expected, found):
        assert status == 0, output
        assert [one["rank"] for one in said] == [[n, ranks, n] for n in range(ranks)]
    assert {one["launcher"] for one in expected[2]} == {"torchrun"}
    assert {one["launcher"] for one in found[2]} == {launcher}
    # Gloo adds in the same order whoever has started the ranks: equal to the last bit.
    weights = {one["weights"] for _, _, said in (expected, found) for one in said}
    assert len(weights) == 1


def test_every_number_of_ranks_learns_from_the_whole_batch(by_torchrun):
    sums = {}
    for ranks in (1, 2, 4):
        status, output, said = by_torchrun(ranks)
        assert status == 0, output
        sums[ranks] = said[0]["sum"]
    assert sums[2] == pytest.approx(sums[1], rel=1e-9)
    assert sums[4] == pytest.approx(sums[1], rel=1e-9)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_given_address_is_used(start, launcher):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store  # free again
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    status, output, said = start(command(launcher, 2), **variables)
    assert status == 0, output
    assert [one["launcher"] for one in said] == [launcher] * 2


@needs_mpich
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
@needs_open_mpi
def test_the_mpiexec_of_another_mpi_is_detected(start):
    """MPICH starts two ranks whose mpi4py loads Open MPI: each is a job of its own for it."""
    status, output, said = start(command("MPICH", 2), "mpi4py", MPI4PY_MPIABI="openmpi")
    assert status != 0
    assert not said
    assert re.search(r"MPICH started rank \d of 2, but mpi4py sees rank 0 of 1", output), output


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
@needs_mpich
def test_the_right_mpi4py_is_accepted(start):
    # Its wheel has the library beside its programs.
    folder = str(Path(str(MPICH)).parents[1] / "lib")
    variables = {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": folder}
    status, output, said = start(command("MPICH", 2), "mpi4py", **variables)
    assert status == 0, output
    assert len(said) == 2


def test_a_restart_meets_no_dead_rank(start):
    """Gloo fails with the keys of dead ranks, which torchrun's store keeps over restarts."""
    words = [*TORCHRUN, "--nproc-per-node=2", "--max-restarts=1"]
    status, output, said = start(words, "die once")
    assert status == 0, output
    assert [one["attempt"] for one in said] == ["1", "1"]


def test_slurm_starts_ranks_on_one_host(tmp_path, package):
    """Its variables by hand: there is no Slurm here."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "TMPDIR": str(tmp_path)}
    environment |= {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, STARTED, tmp_path],
            env={**environment, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0]
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["launcher"] for one in said] == ["Slurm"] * 2
    assert said[0]["weights"] == said[1]["weights"]
    assert not list(tmp_path.glob("ucudnn-*"))


VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}


@given(st.sampled_from(sorted(VARIABLES)), st.data())
def test_each_launcher_is_read(launcher, data):
    size = data.draw(st.integers(1, 9999))
    rank = data.draw(st.integers(0, size - 1))
    local_size = data.draw(st.integers(1, size))
    local_rank = data.draw(st.integers(0, local_size - 1))
    numbers = (rank, size, local_rank, local_size)
    environment = dict(zip(VARIABLES[launcher], map(str, numbers), strict=True))
    assert read_launcher(environment) == Launched(launcher, *numbers)


def variables(launcher: str, rank: int, size: int) -> dict[str, str]:
    return dict(zip(VARIABLES[launcher], map(str, (rank, size, rank, size)), strict=True))


def test_a_process_that_was_started_by_itself_is_a_job_of_one():
    assert read_launcher({}) == Launched("none", 0, 1, 0, 1)


def test_mpirun_in_a_batch_job_of_slurm_counts():
    environment = variables("Slurm", 0, 16) | variables("Open MPI", 3, 4)
    assert read_launcher(environment) == Launched("Open MPI", 3, 4, 3, 4)


def test_srun_that_speaks_pmi():
    environment = variables("Slurm", 3, 4) | {"PMI_RANK": "3", "PMI_SIZE": "4"}
    assert read_launcher(environment) == Launched("MPICH", 3, 4, 3, 4)


def test_torchrun_under_mpirun_counts():
    environment = variables("torchrun", 5, 8) | variables("Open MPI", 1, 2)
    assert read_launcher(environment | {"TORCHELASTIC_RUN_ID": "1"}).size == 8


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (variables("torchrun", 0, 1) | variables("MPICH", 1, 2), "RANK and WORLD_SIZE says rank 0"),
        (variables("Open MPI", 0, 1) | variables("MPICH", 1, 2), "contradict"),
        ({"PMI_RANK": "1"}, "PMI_SIZE above it, which is not set"),
        ({"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "WORLD_SIZE above it, which is 4"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be a number"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_LOCALID is not set"),
    ],
)
def test_variables_that_make_no_job_are_refused(environment, sentence):
    with pytest.raises(RankError, match=sentence):
        read_launcher(environment)


@needs_mpich
def test_an_mpi_whose_variables_are_unknown_is_no_job_of_one(package):
    """Taken away here, as another mpiexec would not set them."""
    program = "from ucudnn.distributed import init; init()"
    words = ["env", *(f"--unset={name}" for name in VARIABLES["MPICH"]), sys.executable, "-c"]
    ended = subprocess.run(
        [str(MPICH), "-n", "2", *words, program],
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode != 0
    assert "every rank would be a job of size 1" in ended.stderr


def test_what_init_sets_for_others_does_not_hide_the_launcher():
    environment = variables("torchrun", 3, 4) | variables("Open MPI", 3, 4)
    assert read_launcher(environment).launcher == "Open MPI"
    assert read_launcher(environment | {"MASTER_ADDR": "node1"}).launcher == "torchrun"


def test_a_first_rank_that_waits_in_vain_leaves_no_file(monkeypatch, tmp_path):
    for name, value in variables("MPICH", 0, 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launchers.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(RankError, match="rank 0 of 2 .MPICH. did not reach the others within 0.2"):
        distributed.init(timeout_s=0.2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_half_an_address_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "29500")
    with pytest.raises(RankError, match=f"{name} is set and MASTER_"):
        distributed.init()


def test_the_hosts_of_a_slurm_step_are_expanded(tmp_path, monkeypatch):
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$3" = "node[3-5]" ] && printf "node3\\nnode4\\nnode5\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    step = {"SLURM_STEP_NODELIST": "node[3-5]", "SLURM_JOB_ID": "77"}
    first, second = (slurm_address({**step, "SLURM_STEP_ID": number}) for number in "01")
    assert first[0] == second[0] == "node3"
    assert first[1] != second[1]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert slurm_address(step) is None
    assert slurm_address({}) is None


def test_ranks_on_several_hosts_need_an_address(monkeypatch):
    for name, value in variables("Open MPI", 1, 4).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RankError, match="set MASTER_ADDR and MASTER_PORT for all of them"):
        distributed.init()


def test_a_rank_whose_first_rank_is_missing_ends_with_a_sentence(monkeypatch, tmp_path):
    for name, value in variables("MPICH", 1, 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launchers.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(RankError, match="rank 0 did not start within 0.2 s"):
        distributed.init(timeout_s=0.2)
