"""Plans for models that nobody touches: torch's convolution operators themselves follow one."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.library import Library

from ucudnn.autograd import Geometry
from ucudnn.backends import original
from ucudnn.closing import AbstractClosable
from ucudnn.forking import ForkSafeLock
from ucudnn.plan import Plan
from ucudnn.runner import Runner, require_same_device
from ucudnn.untraced import untraced

_lock = ForkSafeLock()


class Installation(AbstractClosable):
    """Handle of `installed`: convolutions of this process follow a plan until it closes.

    Args:
        plan: made for this device.
        runner: that looks the plan up, from an earlier installation: what it found then stays
            found; None: a new one.
    """

    def __init__(self, plan: Plan, runner: Runner | None = None) -> None:
        self.runner = Runner(plan) if runner is None else runner
        self._override = _overrides.setdefault(plan.device.type, _Override(plan.device.type))
        self._override.add(self)

    @untraced
    def close(self) -> None:
        """Convolutions follow the plan no more; closing twice does no harm."""
        self._override.remove(self)


@untraced
def installed(plan: Plan) -> Installation:
    """Let convolutions of this process follow a plan: modules, functional calls, compiled graphs.

    Works from the call until the context ends or `close` is called, in all threads, autograd's
    too. Of several plans for one kind of device the last one installed acts, alone. Convolutions of
    layers that the plan was not made for stay torch's own. A CUDA graph keeps what it captured.
    From the first installation on, until the process ends, torch's convolutions take some
    microseconds more; make that one while no other thread computes any.
    torch.compile lays convolutions out channels-last where it expects to gain by that: tune a model
    that is to be compiled in channels_last.

    >>> import tempfile, torch, ucudnn
    >>> layer, x = torch.nn.Conv2d(3, 8, 3), torch.ones(2, 3, 9, 9)
    >>> config = ucudnn.Config(policy="undivided", cache=tempfile.mkdtemp())
    >>> with installed(ucudnn.tune(layer, x, config)):
    ...     y = torch.nn.functional.conv2d(x, layer.weight, layer.bias)
    >>> torch.allclose(y, layer(x), atol=1e-5)
    True

    Args:
        plan: made for this device.

    Raises:
        PlanError: the plan was made for another device.
    """
    require_same_device(plan)
    return Installation(plan)


class _Override:
    """Stands in for aten's two operators on one kind of device, from the first plan on.

    It stays when the last plan has closed, and hands everything on: torch's dispatcher looks a
    kernel up without a lock, so one that is taken away may just be entered by another thread.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._open: list[Installation] = []
        self._library: Library | None = None
        self._runner: Runner | None = None

    def add(self, installation: Installation) -> None:
        with _lock:
            if self._library is None:
                self._library = self._stand_in()
            self._open.append(installation)
            self._runner = installation.runner

    def remove(self, installation: Installation) -> None:
        with _lock:
            if installation not in self._open:
                return
            self._open.remove(installation)
            self._runner = self._open[-1].runner if self._open else None

    def _stand_in(self) -> Library:
        own_forward, own_backward = original.keep(self._device_type)

        @untraced
        def convolution(x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any) -> Any:
            runner = self._runner
            # most convolutions of other models are told apart by their filter alone
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

        library = Library("aten", "IMPL")
        key = original.DISPATCH_KEYS[self._device_type]
        with warnings.catch_warnings():  # torch says so where the device has a kernel of its own
            warnings.filterwarnings("ignore", message="(?s).*a previously registered kernel")
            library.impl("convolution", convolution, key)
            library.impl("convolution_backward", convolution_backward, key)
        return library


def _frozen(
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Geometry:
    """The dispatcher's arguments as a hashable value."""
    return Geometry(
        tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups
    )


_overrides: dict[str, _Override] = {}
