"""Planning by cuDNN for the device of another machine, in a child process.

The child imports no framework. cuDNN loads libcuda and libcublasLt even if it runs nothing. On a
machine without an NVIDIA driver, the system's C compiler builds stubs of these libraries once, in
the user's cache folder (as Triton builds its launcher), and the child loads the stubs before cuDNN.
A process with stubs cannot use a GPU, and a framework that tried would fail with a misleading
error. So importing frameworks is blocked in such a process.
"""

from __future__ import annotations

import csv
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from codecs import getwriter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NamedTuple

from ucudnn.axis import BatchAxis
from ucudnn.backends.cudnn.api import Cudnn, find_library
from ucudnn.backends.cudnn.engine import Configuration, configurations
from ucudnn.backends.cudnn.graph import Target, Views
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.errors import ConfigError, UcudnnError, UnsupportedError
from ucudnn.problem import Problem
from ucudnn.system.files import replacing
from ucudnn.system.processes import start_python

_PROGRAM = "import sys; from ucudnn.backends.cudnn.offline import serve; serve(int(sys.argv[1]))"
_DRIVER = "libcuda.so.1"
# Frameworks that would call the stub as if it were the driver.
_USERS_OF_A_DRIVER = ("torch", "cupy", "jax", "tensorflow")
# Any C compiler will do: the stubs are plain C without headers.
_COMPILERS = ("cc", "gcc", "clang")
# Columns of a file that users read: their names and order must not change.
COLUMNS = (
    *("name", "op", "dtype", "layout", "batch"),
    *("algorithm", "workspace_bytes", "mode", "rank", "notes"),
)


class Listing(NamedTuple):
    """cuDNN's configurations of a problem, best first, or the reason why there are none."""

    problem: Problem
    configurations: tuple[Configuration, ...]
    refusal: str
    cudnn_version: str


def list_configurations(
    problems: Sequence[Problem],
    profile: DeviceProfile,
    library: Path | None = None,
    views: Mapping[Problem, Views] | None = None,
) -> Iterator[Listing]:
    """List the configurations of each problem, in order, on a device that need not be here."""
    request = (library or find_library(), profile, problems, views or {})
    ours, theirs = Pipe()
    # What the child prints goes to a file, because nobody reads a pipe meanwhile: a child that
    # wrote more than a pipe holds would wait forever.
    with ours, tempfile.TemporaryFile("w+") as said:
        number = theirs.fileno()
        # One child for all problems, so that cuDNN is loaded once.
        child = start_python(_PROGRAM, str(number), stdout=said, stderr=said, pass_fds=[number])
        # From here on, only the child holds the other end of the pipe, so that the pipe reports
        # when the child has ended.
        theirs.close()
        with child:
            try:
                ours.send(request)
                for _ in problems:
                    answer: Listing | str = ours.recv()
                    # The child sends expected errors as texts. Any other error ends the child.
                    if isinstance(answer, str):
                        raise UnsupportedError(answer)
                    yield answer
            except (EOFError, OSError):
                status = child.wait()
                said.seek(0)
                raise UnsupportedError(
                    f"the process in which cuDNN plans ended with status {status}: "
                    f"{said.read().strip() or 'it said nothing'}"
                ) from None
            finally:
                child.kill()  # does nothing if the child has ended


def serve(descriptor: int) -> None:
    """Answer the request of `list_configurations`; runs in the child."""
    with Connection(descriptor) as connection:
        library, profile, problems, views = connection.recv()
        try:
            # With a real driver no stubs are needed: cuDNN still plans for the device of the
            # profile.
            if not has_driver():
                load_stubs()
            cudnn = Cudnn(library)
            target = Target(cudnn, device=profile.descriptor(cudnn))
            for problem in problems:
                # One answer at a time, so that the parent can report progress.
                connection.send(_listing(target, problem, views.get(problem)))
        except UcudnnError as error:
            connection.send(str(error))


def _listing(target: Target, problem: Problem, views: Views | None) -> Listing:
    version = target.cudnn.version_text
    try:
        found = configurations(target, problem, views=views)
    except UnsupportedError as error:
        return Listing(problem, (), str(error), version)
    return Listing(problem, tuple(found), "", version)


class _Stub(NamedTuple):
    """A library to build: its file name, its source file and the compiler options of the source."""

    file: str
    source: str
    options: tuple[str, ...] = ()


_CUBLASLT = tuple(
    _Stub(f"libcublasLt.so.{major}", "libcublasLt.c", (f"-DVERSION={major}0000",))
    for major in (12, 13)  # versions of CUDA; cuDNN loads the one that it was built for
)
_STUBS = (_Stub(_DRIVER, "libcuda.c"), *_CUBLASLT)


def has_driver() -> bool:
    """True if this machine has an NVIDIA driver; the driver is loaded, but not started."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def load_stubs(cache: Path | None = None) -> None:
    """Load the stub libraries into this process, which can then plan but not run.

    From then on, importing torch, CuPy, JAX or TensorFlow fails in this process.
    """
    loaded = [name for name in _USERS_OF_A_DRIVER if sys.modules.get(name) is not None]
    if loaded:
        raise UnsupportedError(
            f"the stub of the NVIDIA driver must not enter a process that has loaded "
            f"{', '.join(loaded)}; plan in a child process"
        )
    folder = build_stubs(cache)
    for name in _USERS_OF_A_DRIVER:
        sys.modules[name] = None  # type: ignore[assignment]  # how Python marks what must not load
    for stub in _STUBS:
        ctypes.CDLL(str(folder / stub.file), mode=ctypes.RTLD_GLOBAL)


def build_stubs(cache: Path | None = None) -> Path:
    """Build the stub libraries if they do not exist yet, and return their folder."""
    if cache is None:
        from platformdirs import user_cache_path

        cache = user_cache_path("ucudnn", appauthor=False)
    sources = files("ucudnn.backends.cudnn") / "stubs"
    texts = {stub.source: (sources / stub.source).read_text() for stub in _STUBS}
    # Stubs of another content or for another architecture get another folder, because packages are
    # updated, and machines of two architectures may share a home folder.
    digest = hashlib.sha256(repr((texts, _STUBS, os.uname().machine)).encode()).hexdigest()
    folder = cache / "stubs" / digest[:16]
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The stubs are built beside their final folder, because a rename is atomic only within one
        # file system.
        building = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    except OSError as error:
        raise UnsupportedError(
            f"cannot build the stub of the NVIDIA driver in {folder.parent}: {error.strerror}; "
            f"set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    try:
        for stub in _STUBS:
            _compile(stub, texts[stub.source], building)
        building.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process has built it first
            raise
    finally:
        # This removes what a failed build leaves. After a rename there is nothing to remove.
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _compile(stub: _Stub, source: str, folder: Path) -> None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise UnsupportedError(
            f"planning for a GPU on a machine without an NVIDIA driver needs a C compiler, and "
            f"none of {', '.join(_COMPILERS)} is on the PATH; install gcc or clang"
        )
    options = ("-shared", "-fPIC", "-O1", f"-Wl,-soname,{stub.file}")
    done = subprocess.run(  # noqa: S603 - the system's compiler, on a source of ours
        [compiler, *options, *stub.options, "-x", "c", "-", "-o", str(folder / stub.file)],
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UnsupportedError(
            f"{compiler} could not build {stub.file}, which stands in for the NVIDIA driver: "
            f"{done.stderr.strip() or f'exit status {done.returncode}'}"
        )


@dataclass(frozen=True, slots=True)
class Enumeration:
    """Counts of the listed configurations."""

    rows: int  # rows of the file, where equal layers have rows of their own
    candidates: int  # distinct pairs of problem and algorithm
    problems: int  # distinct problems, where each micro-batch is a problem
    refused: tuple[str, ...]  # a sentence for each problem without configurations
    cudnn: str
    library: str
    device: str

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, {self.candidates} distinct candidates of {self.problems} problems "
            f"on {self.device}, by cuDNN {self.cudnn} ({self.library})"
        )


def enumerate_candidates(
    layers: Sequence[tuple[str, Problem]],
    profile: DeviceProfile,
    output: str | os.PathLike[str],
    on_progress: Callable[[int, int], None] | None = None,
) -> Enumeration:
    """List every configuration of every layer, op and micro-batch, and write a CSV file.

    This needs no GPU: cuDNN's own heuristics answer for the profile's device, in a child process.
    Configurations that PyTorch's rules on float32 forbid are left out (`Configuration.is_allowed`).
    """
    target = Path(output)
    # The output is checked first: listing a whole network takes a while, and would be lost.
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigError(f"candidates are written to a file in a folder that exists, got {target}")
    # A layer that is listed twice appears once.
    chunks = [
        (name, problem.with_batch(size))
        for name, problem in dict.fromkeys(layers)
        for size in BatchAxis(problem).sizes("powers-of-two")
    ]
    # Networks repeat layers, so cuDNN is asked only once for each distinct problem.
    distinct = list(dict.fromkeys(chunk for _, chunk in chunks))
    # The library is looked up once, so that the summary names the library that answered.
    library = find_library()
    listings = _allowed_listings(distinct, profile, library, on_progress)
    rows = _write(target, ((name, listings[chunk]) for name, chunk in chunks))
    return Enumeration(
        rows=rows,
        candidates=sum(len(listing.configurations) for listing in listings.values()),
        problems=len(distinct),
        refused=tuple(one.refusal for one in listings.values() if one.refusal),
        cudnn=listings[distinct[0]].cudnn_version,
        library=str(library),
        device=profile.name,
    )


def _allowed_listings(
    problems: Sequence[Problem],
    profile: DeviceProfile,
    library: Path,
    on_progress: Callable[[int, int], None] | None,
) -> dict[Problem, Listing]:
    listings: dict[Problem, Listing] = {}
    for done, listing in enumerate(list_configurations(problems, profile, library), start=1):
        allowed = (one for one in listing.configurations if one.is_allowed(listing.problem))
        listings[listing.problem] = listing._replace(configurations=tuple(allowed))
        if on_progress is not None:
            on_progress(done, len(problems))
    return listings


def _write(path: Path, entries: Iterable[tuple[str, Listing]]) -> int:
    """Write the table, replacing an existing one; return the number of rows."""
    rows = 0
    try:
        # The table is written beside the file and then renamed, so that an interruption leaves the
        # old file.
        with replacing(path) as stream:
            table = csv.writer(getwriter("utf-8")(stream), lineterminator="\n")
            table.writerow(COLUMNS)
            for name, listing in entries:
                problem = listing.problem
                key = (name, problem.op, problem.dtype, problem.layout, problem.batch)
                for one in listing.configurations:
                    notes = "+".join(one.notes)
                    facts = (one.identity, one.workspace_bytes, one.mode, one.rank, notes)
                    table.writerow((*key, *facts))
                rows += len(listing.configurations)
    except OSError as error:
        raise ConfigError(f"cannot write the candidates to {path}: {error.strerror}") from error
    return rows
