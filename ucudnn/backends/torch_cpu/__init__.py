"""CPU backend: convolution algorithms made of PyTorch operators."""

from __future__ import annotations

from ucudnn.backends.torch_cpu.backend import TorchCpuBackend as TorchCpuBackend
