"""Plans for unmodified models: torch's own convolution operators follow a plan."""

from __future__ import annotations

import warnings
from collections.abc import Container
from typing import Any, Protocol, Self

from torch import Tensor
from torch.library import Library

from ucudnn.backends import aten
from ucudnn.backends.registry import entry_for_device
from ucudnn.execution.autograd import Geometry
from ucudnn.execution.compiling import untraced
from ucudnn.system.processes import ForkSafeLock

# Guards the lists of open installations, because several threads may open and close installations
# at the same time.
_lock = ForkSafeLock()


class Convolution(Protocol):
    """A convolution of operands of fixed shapes, called below autograd, so it records no graph."""

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""
        ...

    def backward(
        self, dy: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x, w and bias that the mask asks for."""
        ...


class StandIn(Protocol):
    """Computes, in place of torch, this process's convolutions with filter shapes that it lists."""

    # Convolutions whose filter shape is not listed stay torch's. The test for a shape takes almost
    # no time.
    @property
    def filter_shapes(self) -> Container[Any]:
        """The shapes of the filters of all convolutions that this object computes."""
        ...

    def bound(self, x: Tensor, w: Tensor, geometry: Geometry) -> Convolution:
        """The convolution of operands with the shapes of x and w."""
        ...


class Everything:
    """A container that contains every filter shape, for a stand-in that computes all convolutions.

    >>> (3, 4, 5) in Everything()
    True
    """

    def __contains__(self, value: object) -> bool:
        return True


class Installation:
    """The context that `ucudnn.installed` returns: inside it, convolutions follow a plan.

    Args:
        device_type: the kind of device whose convolutions follow the plan, "cpu" or "cuda".
        runner: what computes the convolutions by a plan, or records them. If the same runner is
            installed again later, it reuses the calls that it has looked up.
    """

    def __init__(self, device_type: str, runner: StandIn) -> None:
        self.runner = runner
        self._override = _overrides.setdefault(device_type, _Override(device_type))

    @untraced
    def __enter__(self) -> Self:
        self._override.add(self)
        return self

    @untraced
    def __exit__(self, *exception: object) -> None:
        self._override.remove(self)


class _Override:
    """Replaces aten's two convolution operators on a kind of device, from the first `add` on.

    The replacements stay registered after the last installation has closed, and then call torch's
    kernels. They cannot be removed safely: the dispatcher looks kernels up without a lock, so
    another thread may be calling them at that moment.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._open: list[Installation] = []
        self._library: Library | None = None
        self._runner: StandIn | None = None

    def add(self, installation: Installation) -> None:
        with _lock:
            if self._library is None:
                self._library = self._stand_in()
            self._open.append(installation)
            # Only the plan that was installed last acts. The replacements of aten's operators read
            # `_runner` once per call and without the lock. This is safe, because replacing a
            # reference is atomic in Python.
            self._runner = installation.runner

    def remove(self, installation: Installation) -> None:
        with _lock:
            self._open.remove(installation)
            self._runner = self._open[-1].runner if self._open else None

    def _stand_in(self) -> Library:
        dispatch_key = entry_for_device(self._device_type).dispatch_key
        # torch's kernels are looked up and kept before the replacements are registered, because a
        # later look-up would find the replacements.
        own_forward, own_backward = aten.keep_kernels(self._device_type, dispatch_key)

        @untraced
        def convolution(x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any) -> Any:
            runner = self._runner
            # The shape of the filter alone excludes most convolutions that the plan does not cover,
            # such as those of other models.
            if runner is None or w.shape not in runner.filter_shapes:
                return own_forward(x, w, bias, *geometry)
            return runner.bound(x, w, _frozen(*geometry)).forward(x, w, bias)

        @untraced
        def convolution_backward(
            dy: Tensor, x: Tensor, w: Tensor, bias_sizes: Any, *geometry_and_mask: Any
        ) -> Any:
            runner = self._runner
            if runner is None or w.shape not in runner.filter_shapes:
                return own_backward(dy, x, w, bias_sizes, *geometry_and_mask)
            *geometry, mask = geometry_and_mask
            return runner.bound(x, w, _frozen(*geometry)).backward(dy, x, w, bias_sizes, mask)

        # The replacements are registered for the device, below autograd. So torch's own autograd
        # node records the graph, and calls the replacements in forward and in backward.
        library = Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch warns if this replaces a kernel of the device
            warnings.filterwarnings("ignore", message="(?s).*a previously registered kernel")
            library.impl("convolution", convolution, dispatch_key)
            library.impl("convolution_backward", convolution_backward, dispatch_key)
        return library


def _frozen(
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Geometry:
    return Geometry(
        tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups
    )


_overrides: dict[str, _Override] = {}
