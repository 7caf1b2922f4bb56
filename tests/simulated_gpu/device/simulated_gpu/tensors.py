"""Tensors in the memory of the CPU that say they are on the GPU.

A tensor is a GPU's unless it was asked for on the CPU or moved there; results of host tensors are
the GPU's again. Only Python is told so: below it everything is a CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from simulated_gpu import memory

DEVICE = torch.device("cuda", 0)
_base: Any = torch._C.TensorBase
_HOST = "_is_on_the_host"
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like"),
    *("linspace", "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like"),
    *("tensor", "zeros", "zeros_like"),
)
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_CLAIMS: dict[str, Any] = {}


def install() -> None:
    """Replace what makes tensors, moves them and says where they are."""
    for name in _FACTORIES:
        setattr(torch, name, _placed(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _placed(getattr(_base, name)))
    torch.Generator = _Generator  # type: ignore[misc]
    torch.Tensor.to = _to
    torch.Tensor.cuda = lambda tensor, *_, **__: _to(tensor, DEVICE)
    torch.Tensor.cpu = lambda tensor, *_, **__: _to(tensor, "cpu")
    _CLAIMS.update(
        device=property(_device),
        is_cuda=property(lambda tensor: tensor.device.type == "cuda"),
        is_cpu=property(lambda tensor: tensor.device.type == "cpu"),
        get_device=lambda tensor: 0 if tensor.device.type == "cuda" else -1,
    )
    _claim()


def _claim() -> None:
    for name, value in _CLAIMS.items():
        setattr(torch.Tensor, name, value)


@contextmanager
def as_they_are() -> Iterator[None]:
    """Let tensors say where they really are, for code below which torch asks again."""
    for name in _CLAIMS:
        delattr(torch.Tensor, name)
    try:
        yield
    finally:
        _claim()


def _device(tensor: torch.Tensor) -> torch.device:
    where: torch.device = _base.device.__get__(tensor)
    return DEVICE if where.type == "cpu" and not _is_host(tensor) else where


def _is_host(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "__dict__", {}).get(_HOST, False)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor.__dict__[_HOST] = True
    return tensor


def _is_gpu(device: Any) -> bool:
    return isinstance(device, int) or str(device).startswith("cuda")


def _placed(make: Callable[..., Any]) -> Callable[..., Any]:
    """A factory that makes GPU tensors on the CPU."""

    def made(*arguments: Any, **options: Any) -> Any:
        device = options.get("device")
        if options.pop("pin_memory", False):
            device = "cpu"
        if device is not None and _is_gpu(device):
            del options["device"]
        result = make(*arguments, **options)
        if str(device) == "cpu":
            return _on_host(result)
        if type(result) is torch.Tensor and result.is_cuda:
            memory.take(result)
        return result

    return made


class _Generator(torch.Generator):
    """A generator of the CPU, whatever device it is asked for."""

    def __new__(cls, device: Any = "cpu") -> Any:
        del device
        return super().__new__(cls, "cpu")


def _to(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """`Tensor.to`, of which only a change of dtype or layout happens below."""
    device = options.pop("device", None)
    rest = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            device = value.device
            rest.append(value.dtype)
        elif isinstance(value, (str, torch.device)) or type(value) is int:
            device = value
        elif isinstance(value, torch.dtype):
            rest.append(value)
    if device is not None and not _is_gpu(device) and str(device) != "cpu":
        return _base.to(tensor, device, *rest, **options)
    result = _base.to(tensor, *rest, **options) if rest or options else tensor
    is_host = _is_host(tensor) if device is None else not _is_gpu(device)
    if is_host == _is_host(tensor):
        return _on_host(result) if is_host else result
    result = result.clone() if result is tensor else result
    result.__dict__.pop(_HOST, None)
    return _on_host(result) if is_host else result
