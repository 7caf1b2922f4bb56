"""This machine: its processor's name and instructions, memory, load, speed, and malloc."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from ucudnn.backends._base import Roofline
from ucudnn.backends.tensors import torch_dtype
from ucudnn.measurement import Device, Software
from ucudnn.problem import Problem
from ucudnn.system.processes import ForkSafeLock

_CPUINFO = Path("/proc/cpuinfo")
# Control groups that limit memory, versions 2 and 1: how their line of /proc/self/cgroup begins,
# the folder of the outermost group, and the files with the limit and with the use.
_CONTROL_GROUPS = (
    (r"0::", "", "memory.max", "memory.current"),
    (
        r"\d+:(?:[^:]*,)?memory(?:,[^:]*)?:",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
    ),
)
# Limits of a process, and what counts towards each, by its name in /proc/self/status.
_PROCESS_LIMITS = (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData"))
# Memory was short if less than this was left within a limit: oneDNN takes single pages for code.
_SHORT_BYTES = 64 << 20
# Buffers of a benchmark must be larger than the cache. The size of the cache is assumed to be at
# most this, because an overstated size would cost memory and time.
_MOST_CACHE_BYTES = 64 << 20
_DEFAULT_CACHE_BYTES = 32 << 20  # assumed if the system reports no size
# Names of the same architecture on Linux and on Windows.
_X86 = ("x86_64", "AMD64")
# Values of ONEDNN_MAX_CPU_ISA that rule out AVX2, and values that rule out bfloat16 instructions.
_BELOW_AVX2 = ("SSE41", "AVX")
_BELOW_BFLOAT16 = (*_BELOW_AVX2, "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
# The load is measured over at least this interval, because the counters of the system advance only
# in steps of 10 ms.
_LEAST_S = 0.2
# The load is measured over at most this interval. A longer average would not show the present load,
# so a new short interval is measured instead.
_MOST_S = 10.0
# Other processes count as load if they use more than this number of the processors that this
# process needs.
_TOLERATED = 0.25
# The peak rates are measured by matrix products and copies. A convolution may exceed the measured
# rates by up to this factor.
MARGIN = 1.25
# The products that are measured, as (columns, rows per thread). Short products are run many times,
# so that some runs are not interrupted. Long products are measured, too, because in them waiting
# for interrupted threads takes a smaller share of the time.
_PRODUCTS = ((512, 256), (1024, 1024))
_MOST_ROWS = 1 << 14
# For lower bounds of times: an algorithm is assumed to make at most this many passes over its
# operands and temporaries, each of which the cache spares traffic of at most its own size.
_PASSES = 16
_BUDGET_NS = 40_000_000  # a product or copy is repeated for this long
_measuring = ForkSafeLock()
_GLIBC = "glibc"
# glibc raises its mmap threshold by itself only up to 32 MiB. So the pages of a block of this size
# are new at each allocation, unless malloc was set otherwise.
_BLOCK_BYTES, _MOST_THRESHOLD_BYTES = 64 << 20, 32 << 20
# The number of rounds: their median is right even if two of the five were disturbed.
_FILLINGS = 5
# Allocators that users preload instead of glibc's; each has settings of its own.
_REPLACEMENTS = ("tcmalloc", "jemalloc", "mimalloc")


def cpu_device() -> Device:
    """The processor: its model, the vector instructions that torch and oneDNN use, its cores."""
    isa, limit = torch.backends.cpu.get_cpu_capability(), onednn_isa_limit()
    return Device(
        type="cpu",
        name=_cpu_name(),
        isa=f"{isa} (oneDNN: {limit})" if limit else isa,
        cores=os.cpu_count() or 1,
    )


def cpu_software() -> Software:
    """Versions of torch and of the oneDNN inside it."""
    # torch has no function that returns oneDNN's version. Its build summary has the version, under
    # oneDNN's old name.
    match = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    return Software(torch=str(torch.__version__), onednn=match[1] if match else "")


def usable_cache_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the last-level cache, at most 64 MiB; 32 MiB if the system reports none.

    Virtual machines report the cache of the whole processor, which they share with others.
    """
    sizes = [0]
    for path in caches.glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG])", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {"K": 10, "M": 20, "G": 30}[match[2]])
    return min(max(sizes) or _DEFAULT_CACHE_BYTES, _MOST_CACHE_BYTES)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process can allocate without swapping and within all of its limits.

    The limits are those of its control groups, such as a container's, and of `ulimit -v` and `-d`.
    Blocks that malloc keeps unused count as taken; see `give_back_free_blocks`.
    """
    match = re.search(r"MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"))
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    left = [int(match[1]) << 10 if match else physical]
    membership = _text(root / "proc/self/cgroup")
    for line, folder, limit, use in _CONTROL_GROUPS:
        found = re.search(f"^{line}(.*)$", membership, re.MULTILINE)
        for group in _groups(root / "sys/fs/cgroup" / folder, found[1] if found else "/"):
            most, used = _text(group / limit), _text(group / use)  # "max" if there is no limit
            if most.isdigit() and used.isdigit():
                left.append(int(most) - int(used) + _idle_bytes(group / "memory.stat"))
    left += [most - used for most, used, _ in _process_limits(root)]
    return max(0, min(left))


def _groups(outermost: Path, path: str) -> list[Path]:
    """The folders of a process's control group and of those that contain it."""
    # In a container, the path may begin outside of what the container sees as the outermost group.
    parts = Path(path).parts[1:]
    seen = (Path(*parts[place:]) for place in range(len(parts)))
    inner = next((path for path in seen if (outermost / path).is_dir()), Path())
    return [outermost / group for group in (inner, *inner.parents)]


def _idle_bytes(path: Path) -> int:
    """Bytes of cached files in a control group's memory, which the system drops when needed."""
    # Version 1 also has numbers without "total_", which leave out the groups inside this one.
    found = re.findall(r"^(?:total_)?inactive_file (\d+)$", _text(path), re.MULTILINE)
    return max(map(int, found), default=0)


def _process_limits(root: Path = Path("/")) -> Iterator[tuple[int, int, int]]:
    """Each limit of this process, what it uses now of it, and the most that it can have used."""
    status = {
        name: int(size) << 10
        for name, size in re.findall(
            r"^(Vm\w+):\s+(\d+) kB", _text(root / "proc/self/status"), re.M
        )
    }
    for limit, name in _PROCESS_LIMITS:
        most = resource.getrlimit(getattr(resource, limit))[0]
        if most != resource.RLIM_INFINITY and name in status:
            used = status[name]
            yield most, used, used + status.get("VmPeak", 0) - status.get("VmSize", 0)


def was_short_of_memory() -> bool:
    """True if this process has come near a limit of its own (`ulimit -v` or `-d`) at any time."""
    return any(peak > most - _SHORT_BYTES for most, _, peak in _process_limits())


def _text(path: Path) -> str:
    """The text of a file of the system, without space around it; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cpu_name() -> str:
    match = None
    if _CPUINFO.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def onednn_isa_limit() -> str:
    """The newest instruction set that the environment allows oneDNN to use; "" for no limit.

    The variable is read here as oneDNN reads it, because torch has no function for the limit.
    """
    # The second variable is from the time when oneDNN was called DNNL, and still works.
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    return "" if limit.upper() in ("ALL", "DEFAULT") else limit.upper()


def has_instructions(dtype: str) -> bool:
    """True if convolutions and matrix products in a dtype use instructions for that dtype.

    For half precision this is true only with AVX-512, because nothing else was checked.
    """
    cpu, limit = torch.cpu, onednn_isa_limit()
    if dtype == "float16":
        return cpu._is_avx512_supported() and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    if dtype == "bfloat16":
        return cpu._is_avx512_bf16_supported() and limit not in _BELOW_BFLOAT16
    # Without AVX2, float32 and float64 are computed by fallback code, too.
    is_x86 = platform.machine() in _X86
    return not is_x86 or (cpu._is_avx2_supported() and limit not in _BELOW_AVX2)


def product_dtype(problem: Problem) -> torch.dtype:
    """The dtype in which matrices are multiplied for a problem.

    It is float32 if the processor has no instructions for the problem's half precision: torch would
    multiply element by element, or convert operands in memory that its allocator does not see.
    """
    is_half = problem.bytes_per_element == 2
    return (
        torch.float32 if is_half and not has_instructions(problem.dtype) else torch_dtype(problem)
    )


class _Reading(NamedTuple):
    clock_s: float
    machine_s: float  # processor time of all processes, and what the hypervisor gave to others
    own_s: float  # processor time of this process and of its children that have ended


class LoadMeter:
    """Measures how many processors other processes have used since the last call.

    >>> LoadMeter(Path("no/such/file")).load()
    0.0
    """

    def __init__(self, path: Path = Path("/proc/stat")) -> None:
        self._path = path
        self._lock = ForkSafeLock()
        self._last = self._read()
        self._others = 0.0

    def others(self) -> float:
        """Average number of processors that other processes used recently."""
        with self._lock:
            now, last = self._read(), self._last
            if now is not None and last is not None and now.clock_s - last.clock_s > _MOST_S:
                time.sleep(_LEAST_S)
                now, last = self._read(), now
            if now is None or last is None or now.clock_s - last.clock_s < _LEAST_S:
                return self._others
            elapsed_s = now.clock_s - last.clock_s
            spent_s = (now.machine_s - last.machine_s) - (now.own_s - last.own_s)
            self._last, self._others = now, max(0.0, spent_s / elapsed_s)
            return self._others

    def load(self) -> float:
        """Number of processors that others use; 0 if they leave enough for this process."""
        others = self.others()
        left = (os.cpu_count() or 1) - torch.get_num_threads()
        return round(others, 1) if others > max(0, left) + _TOLERATED else 0.0

    def _read(self) -> _Reading | None:
        try:
            line = self._path.read_text(encoding="ascii").partition("\n")[0]
            numbers = [int(text) for text in line.split()[1:9]]
            # The first line of /proc/stat sums up all processors, in clock ticks, see proc_stat(5).
            user, nice, system, _idle, _waiting, interrupts, soft, stolen = numbers
        except (OSError, ValueError):
            return None
        ticks = user + nice + system + interrupts + soft + stolen
        times = os.times()
        own_s = times.user + times.system + times.children_user + times.children_system
        return _Reading(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own_s)


def roofline(dtype: str) -> Roofline:
    """Peak rates of this process with its present threads: `MARGIN` times the measured rates."""
    threads = torch.get_num_threads()
    with _measuring:
        operations = _operations_per_s(dtype, threads)
        if dtype in ("float16", "bfloat16"):
            operations = max(operations, _operations_per_s("float32", threads))
        cached = _PASSES * usable_cache_bytes()
        return Roofline(MARGIN * operations, MARGIN * _bytes_per_s(threads), cached)


@lru_cache
def _operations_per_s(dtype: str, threads: int) -> float:
    best = 0.0
    for side, rows_per_thread in _PRODUCTS:
        rows = min(rows_per_thread * threads, _MOST_ROWS)
        square = torch.ones(side, side, dtype=getattr(torch, dtype), device="cpu")
        left, product = square.new_ones(rows, side), square.new_empty(rows, side)
        best_ns = _shortest_ns(partial(torch.mm, left, square, out=product))
        best = max(best, 2e9 * rows * side**2 / best_ns)
        if best_ns > _BUDGET_NS:  # the processor has no instructions for this dtype
            break
    return best


@lru_cache
def _bytes_per_s(threads: int) -> float:
    """Bytes read and written per second by a copy of a tensor as large as the cache."""
    del threads  # an argument only for the cache: the rate depends on it
    size = usable_cache_bytes()
    source, target = (torch.ones(size, dtype=torch.uint8, device="cpu") for _ in range(2))
    return 2e9 * size / _shortest_ns(partial(target.copy_, source))


def _shortest_ns(run: Callable[[], object]) -> int:
    """The shortest processor time that a run takes in this thread, in nanoseconds.

    All threads do equal parts of the work, so this thread stands for all. Other processes on the
    machine affect the processor time much less than the elapsed time.
    """
    times: list[int] = []
    while sum(times) < _BUDGET_NS:
        before_ns = time.thread_time_ns()
        run()
        times.append(max(1, time.thread_time_ns() - before_ns))
    return min(times)


def describe_allocator() -> str:
    """Name the malloc of this process, and its mmap threshold if one was set."""
    name, threshold = _allocator(), _threshold_of_environment()
    return name if name != _GLIBC or threshold is None else f"{name},mmap_threshold={threshold}"


def _allocator() -> str:
    maps = Path("/proc/self/maps")
    loaded = maps.read_text(errors="replace") if maps.exists() else ""
    for name in _REPLACEMENTS:
        if f"lib{name}" in loaded:
            return name
    # Other C libraries, such as musl's, do not have this function.
    return _GLIBC if hasattr(_c_library(), "gnu_get_libc_version") else "system"


class Filling(NamedTuple):
    """Times of filling a fresh and a reused block of 64 MiB, and page faults: medians of five."""

    fresh_ns: int
    reused_ns: int
    faults: int


def filling() -> Filling:
    """Time the filling of a newly allocated block, and of a block that is in use, in turn."""
    # Unlike those of a newly allocated block, the pages of this block exist before it is timed.
    block = torch.ones(_BLOCK_BYTES // 4, dtype=torch.float32, device="cpu")
    found = list[tuple[int, ...]]()
    for _ in range(_FILLINGS):
        clocks, faults = list[int](), list[int]()
        for run in (partial(torch.ones_like, block), partial(block.fill_, 1), None):
            clocks.append(time.perf_counter_ns())
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
            if run is not None:
                run()
        found.append((clocks[1] - clocks[0], clocks[2] - clocks[1], faults[1] - faults[0]))
    return Filling(*(round(median(column)) for column in zip(*found, strict=True)))


def give_back_free_blocks() -> None:
    """Make glibc's malloc return its free blocks to the system."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FreeBlock:
    """Memory of the C library's malloc that is neither read nor written, until it is deleted.

    Such blocks follow each other without gaps, as aligned tensors do not: nothing can come to lie
    between them that would divide free memory for good.
    """

    def __init__(self, size: int) -> None:
        malloc = _c_library().malloc
        malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        # None where neither malloc nor the system has so much left.
        self._address: int | None = malloc(size)

    def __del__(self) -> None:
        free = _c_library().free
        free.argtypes = [ctypes.c_void_p]
        free(self._address)


def hold_free_blocks() -> list[FreeBlock]:
    """Take those free blocks of glibc's malloc that have room for 32 MiB.

    While they are held, larger tensors get fresh pages from the system, as in a step that has no
    such blocks left.
    """
    held = list[FreeBlock]()
    if not hasattr(_c_library(), "mallinfo2"):  # new in glibc 2.33
        return held
    while True:
        free_bytes = _free_bytes_of_malloc()
        block = FreeBlock(_MOST_THRESHOLD_BYTES)
        # If the block came from the system, or from another malloc, as much as before is free, up
        # to what Python frees meanwhile.
        if _free_bytes_of_malloc() > free_bytes - _MOST_THRESHOLD_BYTES // 2:
            return held
        held.append(block)


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        ("others", 8 * ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def _free_bytes_of_malloc() -> int:
    mallinfo = _c_library().mallinfo2
    mallinfo.restype = _Mallinfo
    free_bytes: int = mallinfo().fordblks
    return free_bytes


def _threshold_of_environment() -> int | None:
    for setting in os.environ.get("GLIBC_TUNABLES", "").split(":"):
        name, _, value = setting.partition("=")
        if name == "glibc.malloc.mmap_threshold" and value.isdigit():
            return int(value)
    value = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    return int(value) if value.isdigit() else None


def _c_library() -> ctypes.CDLL:
    # None stands for the process itself, where the C library is already loaded.
    return ctypes.CDLL(None)
