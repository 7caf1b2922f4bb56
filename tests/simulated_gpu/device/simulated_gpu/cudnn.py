"""Real cuDNN for a device profile, and launches that the CPU computes from addresses."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from simulated_gpu import cuda, faults, tensors

from ucudnn.backends import aten
from ucudnn.backends.cudnn import api, gpu, offline, runtime
from ucudnn.backends.cudnn.graph import Target, View, Views
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.backends.registry import BACKENDS
from ucudnn.problem import Problem

_ORDER = {"fprop": "xwy", "dgrad": "ywx", "wgrad": "xyw"}
_FAILED = (5003, "CUDNN_STATUS_EXECUTION_FAILED_CUDART", "simulated", "finalize EXECUTION_PLAN")


def load(stubs: Path, library: str | None) -> None:
    """Load the stub of the driver, and cuDNN where torch brings none."""
    folder = offline.build_stubs(stubs)
    names = ["libcuda.so.1"]
    if library is not None:
        names += [path.name for path in folder.glob("libcublasLt*")]
    for name in names:
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    if library is not None:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


class _Handle:
    """Stand in for `api.Handle`, without a device."""

    def __init__(self, _cudnn: Any) -> None:
        self.stream = -1

    def set_stream(self, stream: int) -> None:
        """Note the stream."""
        self.stream = stream


class _Plan(NamedTuple):
    """A plan that cuDNN has built, with what is needed to compute it."""

    built: Any
    problem: Problem
    alpha: float
    beta: float
    views: Views

    @property
    def workspace_bytes(self) -> int:
        """The workspace that cuDNN asks for."""
        return self.built.workspace_bytes


class _Pack(NamedTuple):
    """The addresses of a launch."""

    pointers: tuple[int, ...]
    workspace: int


def install(profile: str) -> None:
    """Let ucudnn's runtime plan by the profile and launch on the CPU.

    Args:
        profile: the device as cuDNN describes it, in JSON.
    """
    text = json.dumps({**json.loads(profile), "deviceName": cuda.NAME})
    device = DeviceProfile.parse(text, "of the simulated GPU")
    runtime.Handle = api.Handle = _Handle  # type: ignore[misc]
    DeviceProfile.text_of_handle = staticmethod(lambda *_: text)  # type: ignore[method-assign]
    gpu._cupy = lambda: None  # type: ignore[assignment]
    descriptors: dict[str, Any] = {}

    def target(self: runtime.Runtime, index: int) -> Target:
        self._handle(index)
        if not descriptors:
            descriptors["of the device"] = device.descriptor(self.cudnn)
        return Target(self.cudnn, device=descriptors["of the device"])

    runtime.Runtime._target = target  # type: ignore[method-assign]
    runtime.build_plan = _building(runtime.build_plan)
    runtime.Runtime.pack = lambda _, __, *addresses: _Pack(*addresses)  # type: ignore[method-assign]
    runtime.Runtime.launch = _launch  # type: ignore[method-assign]
    _let_torch_see_its_tensors()
    patience = os.environ.get("SIMULATED_GPU_PATIENCE")
    if patience is not None:
        from ucudnn.backends.cudnn.backend import CudnnBackend

        CudnnBackend.candidate_timeout_s = float(patience)


def _building(build: Callable[..., Any]) -> Callable[..., _Plan]:
    def built(
        target: Target, problem: Problem, identity: str, *, alpha: float, beta: float, views: Views
    ) -> _Plan:
        faults.require_working()
        if faults.is_due("fail", identity):
            raise api.CudnnError(*_FAILED)
        plan = build(target, problem, identity, alpha=alpha, beta=beta, views=views)
        return _Plan(plan, problem, alpha, beta, views)

    return built


def _launch(self: runtime.Runtime, device: int, launches: Iterable[tuple[_Plan, _Pack]]) -> None:
    """Compute each plan with the addresses of its pack alone."""
    handle: Any = self._handle(device)
    assert handle.stream == torch.cuda.current_stream().cuda_stream, "it follows another stream"
    for plan, pack in launches:
        _compute(plan, pack)


def _compute(plan: _Plan, pack: _Pack) -> None:
    """Compute alpha * convolution + bias + beta * result."""
    faults.at_launch(plan.built.identity)
    assert bool(pack.workspace) == bool(plan.workspace_bytes), "it has no workspace"
    problem = plan.problem
    shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    *operands, out = (
        _at(pointer, getattr(plan.views, name), shapes[name], problem.dtype)
        for name, pointer in zip(_ORDER[problem.op], pack.pointers, strict=False)
    )
    result = plan.alpha * _exact(problem, *(operand.double() for operand in operands))
    for pointer in pack.pointers[3:]:  # of a bias
        shape = (problem.out_channels, *[1] * problem.rank)
        result += _at(pointer, View((1,) * len(shape), 16), shape, problem.dtype).double()
    with torch.no_grad():
        out.copy_(result + plan.beta * out.double() if plan.beta else result)


def _at(pointer: int, view: View, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    assert pointer % view.alignment_bytes == 0, f"address {pointer:#x} is not aligned as planned"
    kind = getattr(torch, dtype)
    last = sum((size - 1) * stride for size, stride in zip(shape, view.strides, strict=True))
    memory = (ctypes.c_char * ((last + 1) * kind.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=kind).as_strided(shape, view.strides)


def _exact(problem: Problem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The convolution by torch's operators of the CPU, on padded operands.

    A launch may happen inside `ucudnn.installed`, below autograd: no operator that a plan stands in
    for may be called, and nothing may be differentiated.
    """
    padding = [amount for pair in reversed(problem.padding) for amount in pair]
    none = [0] * problem.rank
    geometry = (list(problem.stride), none, list(problem.dilation), False, none, problem.groups)
    if problem.op == "fprop":
        x = torch.nn.functional.pad(a, padding)
        return aten.convolution(x, b, None, *geometry)
    if problem.op == "dgrad":
        x = torch.nn.functional.pad(torch.zeros(problem.x_shape, dtype=torch.float64), padding)
        mask = [True, False, False]
        dx = aten.convolution_backward(a, x, b, None, *geometry, mask)[0]
        return torch.nn.functional.pad(dx, [-amount for amount in padding])
    x = torch.nn.functional.pad(a, padding)
    w = torch.zeros(problem.w_shape, dtype=torch.float64)
    return aten.convolution_backward(b, x, w, None, *geometry, [False, True, False])[1]


def _let_torch_see_its_tensors() -> None:
    """Tell torch the true devices of tensors where it asks for them below Python."""
    from ucudnn.steps import tracing
    from ucudnn.steps.foresee import Foreseer

    BACKENDS["cudnn"] = replace(BACKENDS["cudnn"], dispatch_key="CPU")
    init = tracing.StepRecorder.__init__

    def recorder(self: Any, passes: Any, device_type: str | None) -> None:
        init(self, passes, device_type or "cuda")

    tracing.StepRecorder.__init__ = recorder  # type: ignore[method-assign]
    tracing.trace_layers = _as_they_are(tracing.trace_layers)
    Foreseer._foreseen = _as_they_are(Foreseer._foreseen)  # type: ignore[method-assign]


def _as_they_are(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        with tensors.as_they_are():
            return function(*arguments, **options)

    return called
