"""Rank, size and address of a job as torchrun, Open MPI, MPICH or Slurm tell them in variables."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ucudnn.errors import RankError

# Programs of MPI and Slurm that start ranks, as the kernel names them (15 characters at most).
_STARTERS = (
    *("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"),
    *("orted", "prted", "hydra_pmi_proxy", "slurmstepd"),
)
# Fixed ports of Slurm jobs come from this range, above those of common services.
_FIRST_PORT, _PORTS = 20000, 10000


@dataclass(frozen=True, slots=True)
class _Variables:
    """Names of a launcher's variables; of several names for one fact the first that is set counts.

    Args:
        launcher: its name.
        rank: number of a process in the job.
        size: number of processes of the job.
        local_rank: number of a process on its host.
        local_size: number of processes on the host.
    """

    launcher: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


_TORCHRUN = _Variables("torchrun", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_OPEN_MPI = _Variables(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
# srun sets PMI_RANK too, if it speaks PMI; the numbers within a host are then Slurm's.
_MPICH = _Variables(
    "MPICH",
    "PMI_RANK",
    ("PMI_SIZE",),
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"),
)
# SLURM_NTASKS is that of the batch job, of which an srun may start a part.
_SLURM = _Variables(
    "Slurm",
    "SLURM_PROCID",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    ("SLURM_LOCALID",),
    ("SLURM_NTASKS_PER_NODE",),
)


@dataclass(frozen=True, slots=True)
class Launched:
    """Place of this process in its job, as the launcher tells it.

    Args:
        launcher: "torchrun" (or whatever set torch's own variables), "Open MPI", "MPICH", "Slurm",
            or "none" for a process that was started by itself.
        rank: number of this process.
        size: number of processes.
        local_rank: number of this process on its host.
        local_size: number of processes on this host.
    """

    launcher: str = "none"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def read_launcher(environment: Mapping[str, str]) -> Launched:
    """Read a launcher's variables.

    >>> read_launcher({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"})
    Launched(launcher='MPICH', rank=1, size=4, local_rank=1, local_size=4)

    Args:
        environment: such as `os.environ`.

    Raises:
        RankError: variables are missing, are no numbers, or contradict each other.
    """
    mpi = [_read(names, environment) for names in (_OPEN_MPI, _MPICH) if names.rank in environment]
    if _TORCHRUN.rank in environment:
        found = _read(_TORCHRUN, environment)
        # torchrun itself may be started by mpirun, once per host; then the sizes differ rightly.
        if "TORCHELASTIC_RUN_ID" not in environment:
            _require_same([found, *mpi])
            # Without an address they are what `init` has set for others, after it found the ranks.
            if mpi and "MASTER_ADDR" not in environment:
                return mpi[0]
        return found
    if mpi:
        _require_same(mpi)
        return mpi[0]
    # Last, because mpirun in a batch job of Slurm leaves the variables of that job as they are.
    return _read(_SLURM, environment) if _SLURM.rank in environment else Launched()


def _read(names: _Variables, environment: Mapping[str, str]) -> Launched:
    rank = _number(names, (names.rank,), environment)
    size = _number(names, names.size, environment)
    if rank is None or size is None or not 0 <= rank < size:
        raise RankError(
            f"{names.rank}={environment.get(names.rank)} needs {names.size[0]} above it, which is "
            f"{environment.get(names.size[0], 'not set')}; start the ranks by torchrun, mpirun, "
            f"mpiexec or srun, or set both"
        )
    local_size = _number(names, names.local_size, environment)
    local_rank = _number(names, names.local_rank, environment)
    if local_rank is None and size > 1:
        raise RankError(
            f"{names.launcher} started {size} ranks and does not tell their numbers on this host: "
            f"{names.local_rank[0]} is not set; set it"
        )
    # On one host, unless it says otherwise.
    return Launched(names.launcher, rank, size, local_rank or 0, local_size or size)


def _number(
    names: _Variables, variables: tuple[str, ...], environment: Mapping[str, str]
) -> int | None:
    for variable in variables:
        text = environment.get(variable)
        if text:
            if not re.fullmatch(r"\d{1,9}", text):
                raise RankError(
                    f"{variable} must be a number, as {names.launcher} sets it, got {text!r}"
                )
            return int(text)
    return None


def _require_same(found: list[Launched]) -> None:
    """Refuse variables of two launchers that contradict each other."""
    first = found[0]
    for other in found[1:]:
        if (first.rank, first.size) != (other.rank, other.size):
            raise RankError(
                f"the variables of two launchers contradict each other: {_name(first)} says rank "
                f"{first.rank} of {first.size}, {other.launcher} says rank {other.rank} of "
                f"{other.size}; use the mpiexec of one MPI, and unset what the other has left"
            )


def _name(launched: Launched) -> str:
    return "RANK and WORLD_SIZE" if launched.launcher == "torchrun" else launched.launcher


def require_communicator(launched: Launched, rank: int, size: int) -> None:
    """Compare the job with the communicator that an MPI library made of it.

    An mpiexec starts N separate jobs of size 1 if the program loads the library of another MPI.

    >>> require_communicator(Launched("MPICH", 1, 4, 1, 4), 1, 4)

    Args:
        launched: the job by the launcher's variables.
        rank: the number of this process by the library.
        size: the number of processes by the library.

    Raises:
        RankError: they differ.
    """
    if (rank, size) != (launched.rank, launched.size):
        raise RankError(
            f"{launched.launcher} started rank {launched.rank} of {launched.size}, but mpi4py sees "
            f"rank {rank} of {size}: it has loaded the library of another MPI; start the job by "
            f"the mpiexec of that one, or choose the library by MPI4PY_MPIABI",
            (launched.rank,),
        )


def require_known_launcher(launched: Launched) -> None:
    """Refuse to be a job of one that was started by an MPI whose variables are unknown.

    Raises:
        RankError: mpiexec, mpirun or srun is among the parents of this process.
    """
    name, _ = _starter()
    if launched.launcher == "none" and name:
        raise RankError(
            f"{name} started this process, but none of the variables of torchrun, Open MPI, MPICH "
            f"or Slurm is set, so that every rank would be a job of size 1; use the mpiexec of one "
            f"of these, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )


def meeting_file() -> Path:
    """Path that all ranks of one host agree on, and no other job: it names the launcher's process.

    >>> meeting_file().name.startswith("ucudnn-")
    True
    """
    _, process = _starter()
    return Path(tempfile.gettempdir()) / f"ucudnn-{os.getuid()}-{process}"


def _starter() -> tuple[str, str]:
    """Name and identity of the process of MPI or Slurm above this one; "" if there is none."""
    process = os.getppid()
    while process > 1:
        try:
            # "pid (name) state parent ...", see proc_pid_stat(5); a name may hold brackets.
            text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            break
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        if name in _STARTERS:
            # A number of a process is used again, but not with the same time of its start.
            return name, f"{process}-{fields[19]}"
        process = int(fields[1])
    return "", f"{os.getppid()}"


def slurm_address(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Host of rank 0 of a Slurm step and a port that follows from the numbers of job and step.

    >>> slurm_address({"SLURM_STEP_NODELIST": "node7", "SLURM_JOB_ID": "12"})
    ('node7', 20372)

    Args:
        environment: such as `os.environ`.

    Returns:
        None outside of Slurm, or where `scontrol` does not expand the list of hosts.
    """
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not hosts:
        return None
    if set(hosts) & set("[,"):
        try:
            command = ["scontrol", "show", "hostnames", hosts]
            # Slurm's own program, whose argument is a list of hosts that Slurm has written.
            listed = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
            hosts = listed.stdout
        except (OSError, subprocess.CalledProcessError):
            return None
    numbers = [environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(text) if text.isdecimal() else 0 for text in numbers)
    # All ranks work out the same port, and two steps of one node hardly ever do.
    return hosts.split()[0], _FIRST_PORT + (31 * job + step) % _PORTS
