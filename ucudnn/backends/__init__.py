"""Backends, the seam to the hardware: one module or package for each, the contract in `_base`.

registry.py   which backends there are, and how to start one
torch_cpu/    CPUs: the algorithms that torch's operators give
cudnn/        NVIDIA GPUs: cuDNN's engines
recorded.py   any device that is not here, from its measurements
aten.py       torch's own convolution, also while a plan stands in for it
tensors.py    problems of tensors, and dtypes, layouts and strides as torch has them
"""

from __future__ import annotations

# `import X as X` marks a name as exported, for type checkers in strict mode.
from ucudnn.backends._base import AbstractBackend as AbstractBackend
from ucudnn.backends._base import Activity as Activity
from ucudnn.backends._base import Cost as Cost
from ucudnn.backends._base import Executable as Executable
from ucudnn.backends._base import Roofline as Roofline
from ucudnn.backends._base import Span as Span
from ucudnn.backends.registry import open_backend as open_backend
from ucudnn.backends.registry import sees_a_gpu as sees_a_gpu
