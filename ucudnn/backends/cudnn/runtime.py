"""cuDNN on the GPUs of this process: handles, execution plans, launches.

A launch runs on torch's current stream, waits for nothing and allocates only through torch. So it
can be captured in a CUDA graph. But the first launch of a thread also makes a handle, and makes
cuDNN load CUDA modules. So a call must run once before it is captured.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from ucudnn.backends.cudnn.api import Cudnn, CudnnError, Descriptor, Handle
from ucudnn.backends.cudnn.constants import Attribute, DescriptorKind
from ucudnn.backends.cudnn.engine import Configuration, ExecutionPlan, build_plan, configurations
from ucudnn.backends.cudnn.graph import Target, Views
from ucudnn.errors import UnsupportedError
from ucudnn.problem import Problem
from ucudnn.system.processes import ForkSafeLock


class Runtime:
    """Builds execution plans of cuDNN and launches them.

    cuDNN forbids two threads to use one handle at once, so each thread has one handle per device. A
    new thread may get the number of a thread that has ended, and then also gets the handle of that
    thread. So there are never more handles per device than threads that ran at the same time.
    """

    def __init__(self, cudnn: Cudnn) -> None:
        self.cudnn = cudnn
        # Handles and their streams by thread and device. This dict needs no lock: each thread reads
        # and writes only keys with its own number.
        self._handles: dict[tuple[int, int], tuple[Handle, int]] = {}
        self._building = ForkSafeLock()  # cuDNN builds one plan at a time anyway

    def _handle(self, device: int) -> Handle:
        """This thread's handle on a device, set to torch's current stream."""
        # Autograd runs backward in threads of its own, which get handles at their first launch.
        key = (threading.get_ident(), device)
        stream = _current_stream(device)
        held = self._handles.get(key)
        # Nearly every call returns here, because the stream rarely changes. Setting it would cost
        # microseconds.
        if held is not None and held[1] == stream:
            return held[0]
        if held is None:
            # cudnnCreate opens the device that is current in the calling thread.
            with torch.cuda.device(device):
                handle = Handle(self.cudnn)
        else:
            handle = held[0]
        handle.set_stream(stream)
        self._handles[key] = handle, stream
        return handle

    def configurations(
        self, device: int, problem: Problem, bias: bool = False
    ) -> list[Configuration]:
        """Engine configurations that cuDNN proposes for a problem, with or without a fused bias."""
        with self._building, torch.cuda.device(device):
            return configurations(self._target(device), problem, bias=bias)

    def build_plan(
        self, device: int, problem: Problem, identity: str, alpha: float, beta: float, views: Views
    ) -> ExecutionPlan:
        """Build a plan that computes alpha * convolution + beta * (old value of the result).

        Only one thread at a time may launch the plan.
        """
        with self._building, torch.cuda.device(device), _failures():
            target = self._target(device)
            return build_plan(target, problem, identity, alpha=alpha, beta=beta, views=views)

    def _target(self, device: int) -> Target:
        return Target(self.cudnn, handle=self._handle(device))

    def pack(self, plan: ExecutionPlan, pointers: tuple[int, ...], workspace: int) -> Descriptor:
        """Describe the addresses for a launch: operands, result, bias if any, and workspace."""
        with _failures():
            # A finalized pack cannot be changed, so other addresses need another pack.
            pack = Descriptor(self.cudnn, DescriptorKind.VARIANT_PACK)
            pack.set_int64(Attribute.VARIANT_PACK_UNIQUE_IDS, *plan.uids)
            pack.set_pointers(Attribute.VARIANT_PACK_DATA_POINTERS, *pointers)
            pack.set_pointers(Attribute.VARIANT_PACK_WORKSPACE, workspace)
            return pack.finalize()

    def launch(self, device: int, launches: Iterable[tuple[ExecutionPlan, Descriptor]]) -> None:
        """Enqueue plans, each with its pack of addresses, on the current stream of a device.

        Raises:
            UnsupportedError: an engine does not accept the addresses after all.
            RuntimeError: cuDNN fails.
        """
        # Entering `torch.cuda.device` takes time, and nearly all launches can do without.
        elsewhere = torch.cuda.current_device() != device
        try:
            with torch.cuda.device(device) if elsewhere else nullcontext():
                handle, execute = self._handle(device), self.cudnn.functions.cudnnBackendExecute
                # This runs for every chunk of a training step. To save time, `check` is only called
                # after an error.
                for plan, pack in launches:
                    status = execute(handle.pointer, plan.descriptor.pointer, pack.pointer)
                    if status:
                        self.cudnn.check(status, "execute a plan")
        except CudnnError as error:  # not by `_failures`, whose generator takes a microsecond
            if error.is_refusal:
                raise UnsupportedError(str(error)) from error
            raise RuntimeError(str(error)) from error


@contextmanager
def _failures() -> Iterator[None]:
    """Raise failures of cuDNN as RuntimeErrors, as torch does for its own operators.

    Tuning then marks the candidate as failed, and checks whether the device still works.
    """
    try:
        yield
    except CudnnError as error:
        raise RuntimeError(str(error)) from error


def _current_stream(device: int) -> int:
    # `torch.cuda.current_stream(device).cuda_stream` gives the same number, but makes two objects.
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream
