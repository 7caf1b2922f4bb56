"""Backends, one module or package per kind of hardware. `_base` defines what each must implement.

registry.py   list of the backends, and the functions that start one
torch_cpu/    CPUs: algorithms made of torch's operators
cudnn/        NVIDIA GPUs: cuDNN's engines
recorded.py   any device, replayed from its measurements
aten.py       torch's own convolution, also while a plan is installed
tensors.py    which problem a call is; dtypes, layouts and strides in torch's terms
"""

from __future__ import annotations

# `import X as X` marks a name as exported, for type checkers in strict mode.
from ucudnn.backends._base import AbstractBackend as AbstractBackend
from ucudnn.backends._base import Activity as Activity
from ucudnn.backends._base import BoundChunk as BoundChunk
from ucudnn.backends._base import Cost as Cost
from ucudnn.backends._base import DeviceState as DeviceState
from ucudnn.backends._base import Elapsed as Elapsed
from ucudnn.backends._base import Executable as Executable
from ucudnn.backends._base import Launcher as Launcher
from ucudnn.backends._base import Roofline as Roofline
from ucudnn.backends._base import Span as Span
from ucudnn.backends._base import add_bias as add_bias
from ucudnn.backends.registry import open_backend as open_backend
