"""torch.cuda of one device that does everything at once: streams, events and graphs only count."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from simulated_gpu import faults, memory
from simulated_gpu.tensors import DEVICE

NAME = "simulated"
_L2_BYTES = 1 << 20  # small, so that what rotates through it is
_here = threading.local()
_captures = [0]


class Stream:
    """A number; work is done before anyone can wait for it."""

    made = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        Stream.made += 1
        self.cuda_stream = 0x1000 + Stream.made
        self.device = DEVICE

    def wait_stream(self, _stream: Stream) -> None:
        """Nothing is left to wait for."""

    def wait_event(self, _event: Event) -> None:
        """Likewise."""

    def synchronize(self) -> None:
        """Raise where a launch has faulted."""
        faults.require_working()

    def query(self) -> bool:
        """True: everything is done."""
        return True


class Event:
    """The host's clock."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._times = enable_timing
        self._at = 0.0

    def record(self, _stream: Stream | None = None) -> None:
        """Read the clock."""
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Raise where a launch has faulted."""
        faults.require_working()

    def query(self) -> bool:
        """True: everything is done."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds from this event to another."""
        if not (self._times and other._times):
            raise RuntimeError("both events must be created with enable_timing=True")
        return max(1e-6, (other._at - self._at) * 1e3)


class CUDAGraph:
    """Holds nothing: capturing computes, and replaying does not."""

    def replay(self) -> None:
        """Do nothing."""


class _Device:
    """The context manager `torch.cuda.device`."""

    def __init__(self, _device: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _current_stream(_device: Any = None) -> Stream:
    return getattr(_here, "stream", None) or _default_stream


@contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    before = _current_stream()
    _here.stream = stream
    try:
        yield
    finally:
        _here.stream = before


@contextmanager
def _graph(_graph: CUDAGraph, **_: Any) -> Iterator[None]:
    _captures[0] += 1
    try:
        with _stream(Stream()):
            yield
    finally:
        _captures[0] -= 1


_default_stream = Stream()
_default_stream.cuda_stream = 0


def install(profile: str) -> None:
    """Replace what torch asks CUDA.

    Args:
        profile: the device as cuDNN describes it, in JSON.
    """
    fields = json.loads(profile)
    memory.install(fields["totalGlobalMem"])
    major, minor = divmod(fields["deviceVer"] // 10, 10)
    properties = SimpleNamespace(
        name=NAME,
        major=major,
        minor=minor,
        multi_processor_count=fields["multiProcessorCount"],
        total_memory=fields["totalGlobalMem"],
        L2_cache_size=_L2_BYTES,
        uuid=NAME,
    )
    replaced: dict[str, Any] = {
        **{name: _constant(None) for name in _NOTHING},
        **{name: _constant(0) for name in _ZERO},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: _captures[0] > 0,
        "device_count": lambda: 1,
        "synchronize": lambda *_: faults.require_working(),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": _graph,
        "stream": _stream,
        "device": _Device,
        "current_stream": _current_stream,
        "default_stream": lambda *_: _default_stream,
        "get_per_process_memory_fraction": memory.fraction,
        "set_per_process_memory_fraction": memory.set_fraction,
        "mem_get_info": memory.info,
        "memory_allocated": memory.allocated,
        "memory_reserved": memory.allocated,
        "memory_stats": lambda *_: defaultdict(int),
        "get_allocator_backend": lambda: "native",
        "get_rng_state": lambda *_: torch.random.get_rng_state(),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: NAME,
        "get_device_capability": lambda *_: (major, minor),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch._C._cuda_getCurrentRawStream = lambda _: _current_stream().cuda_stream
    torch.version.cuda = torch.version.cuda or NAME
    torch.compile = lambda model=None, **_: model
    _autocast()


_NOTHING = (
    *("_lazy_init", "_sleep", "empty_cache", "init", "manual_seed", "manual_seed_all"),
    *("reset_peak_memory_stats", "set_device", "set_rng_state", "set_sync_debug_mode"),
)
_ZERO = ("current_device", "max_memory_allocated", "max_memory_reserved")


def _constant(value: int | None) -> Any:
    """A new function each time: torch._dynamo looks functions up."""

    def answer(*_: Any, **__: Any) -> int | None:
        faults.require_working()
        return value

    return answer


def _autocast() -> None:
    """Let autocast of the GPU be that of the CPU, where the tensors are."""
    init, is_enabled, dtype = (
        torch.autocast.__init__,
        torch.is_autocast_enabled,
        torch.get_autocast_dtype,
    )

    def on_cpu(name: str = "cuda") -> str:
        return "cpu" if name == "cuda" else name

    def autocast(self: Any, device_type: str, *arguments: Any, **options: Any) -> None:
        init(self, on_cpu(device_type), *arguments, **options)

    torch.autocast.__init__ = autocast
    torch.is_autocast_enabled = lambda name="cuda": is_enabled(on_cpu(name))
    torch.get_autocast_dtype = lambda name: dtype(on_cpu(name))
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    os.environ.setdefault("OMP_NUM_THREADS", "1")
