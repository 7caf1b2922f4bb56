"""Time of a rank that has nothing to measure, while others on its device measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ucudnn.backends import AbstractBackend
from ucudnn.config import ranks_per_device
from ucudnn.problem import Problem
from ucudnn.split import DEFAULT_ALGORITHM

# Each poll of the work queue is a few requests to the store.
_POLL_S = 0.05


def idling(
    backend: AbstractBackend, problems: Sequence[Problem], has_own_cpus: bool
) -> Callable[[], None]:
    """Choose how a rank spends the time between two looks at the work queue.

    In training, ranks that share a device are all busy at once. A time that is taken while the
    others pause would be too short, so they run torch's own convolution meanwhile.

    >>> from ucudnn.backends import open_backend
    >>> problem = Problem("fprop", 2, 4, 4, (9, 9), (1, 1))
    >>> idling(open_backend("torch_cpu"), [problem], has_own_cpus=True)()  # not shared: it sleeps

    Args:
        backend: of the device.
        problems: those that the job tunes, one of which is run.
        has_own_cpus: no other rank measures on the same cores, in turn with this one.
    """
    # Neither the smallest nor the largest, which stand for few of a model's layers.
    ordered = sorted(problems, key=lambda problem: problem.flops)
    typical = ordered[len(ordered) // 2]
    if (
        ranks_per_device() == 1
        or not has_own_cpus
        or backend.refusal(typical, DEFAULT_ALGORITHM) is not None
    ):
        return lambda: time.sleep(_POLL_S)
    convolution = backend.executable(typical, DEFAULT_ALGORITHM)
    operands = backend.operands(typical, typical.batch)

    def run() -> None:
        deadline = time.monotonic() + _POLL_S
        while time.monotonic() < deadline:
            # Timed, although nobody needs it: that waits for the device, whose queue would grow.
            backend.elapsed_ns(lambda: convolution.alone(*operands))

    return run
