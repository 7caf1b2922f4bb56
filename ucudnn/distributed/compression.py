"""Compressed gradients in DistributedDataParallel: a communication hook with error feedback.

The hook encodes the gradient of each parameter by itself, so results do not depend on buckets,
which DDP arranges anew after its first step. The hook starts one exchange per bucket while backward
goes on. When all buckets of a step have come, it waits for all exchanges, because DDP itself waits
only then. It adds no Python callbacks to futures of gloo, which must not hold any (pytorch#179291).

`from __future__ import annotations` is left out: DDP compares a hook's annotations with classes.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from ucudnn.distributed.agreement import require_equal
from ucudnn.distributed.codecs import Codec, Half
from ucudnn.distributed.rendezvous import Rendezvous
from ucudnn.errors import ConfigError


def compress(
    replica: DistributedDataParallel,
    codec: Codec | Half,
    scaler: torch.amp.GradScaler | None = None,
    timeout_s: float = 300.0,
) -> "Compression":
    """Send compressed gradients in place of whole ones; call it on all ranks before the first step.

    What a message leaves out is added to the next gradient of the same rank. If no rank uses a
    parameter in a step, what was left out before stays for a step that uses it. Each message goes
    to all ranks, so compression saves most in jobs of few ranks. If a rank would not send fewer
    bytes by messages than by whole gradients, whole gradients are sent (`is_dense`).

    >>> from torch.distributed import HashStore
    >>> from ucudnn.distributed import TopK
    >>> dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> replica = DistributedDataParallel(nn.Linear(100, 1))
    >>> compression = compress(replica, TopK(0.01))
    >>> compression.is_dense  # this process alone sends nothing
    True
    >>> dist.destroy_process_group()

    Args:
        replica: the wrapped model, without another communication hook.
        codec: `Half`, `TopK`, `OneBit` or `Stochastic`; the same on all ranks.
        scaler: the GradScaler of the loss; None: the loss is not scaled.
        timeout_s: seconds to wait for another rank.

    Raises:
        ConfigError: the model is not wrapped, has a hook already, or has gradients that are sparse
            or complex; or `codec` is no codec.
        RankError: ranks differ in the codec, or do not arrive.
    """
    if not isinstance(replica, DistributedDataParallel):
        raise ConfigError(
            f"compress takes a model wrapped in DistributedDataParallel, got "
            f"{type(replica).__name__}; FSDP2 has set_all_reduce_hook"
        )
    if not isinstance(codec, Codec | Half):
        raise ConfigError(f"codec must be Half, TopK, OneBit or Stochastic, got {codec!r}")
    _require_dense(replica.module)
    with Rendezvous("compress", replica.process_group, timeout_s) as rendezvous:
        facts = {"codec": str(codec), "use of a scaler": str(scaler is not None)}
        require_equal(rendezvous.exchange("codec", facts))
    compression = Compression(replica, codec, scaler)
    register(replica, compression, keeps_unused=not compression.is_dense)
    return compression


def _require_dense(model: nn.Module) -> None:
    for path, module in model.named_modules():
        # Embedding and EmbeddingBag have this attribute, by which DDP also finds sparse gradients.
        if getattr(module, "sparse", False) is True:
            raise ConfigError(
                f"gradients must be dense, and those of {path or 'the model'} are sparse; use "
                f"sparse=False"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(f"gradients must be real, and those of {name} are complex")


@dataclass(frozen=True, slots=True)
class _Pending:
    """A bucket whose exchange has begun.

    Args:
        work: the running exchange.
        messages: the messages of all ranks, filled when `work` ends; empty for an all-reduce.
        summed: the tensor of an all-reduce: the bucket's buffer, or a copy of it in bfloat16.
        left: the part of each gradient that this rank did not send, by parameter name.
    """

    work: Any
    messages: Sequence[Tensor]
    summed: Tensor
    left: Mapping[str, Tensor]


class Compression:
    """State of the hook of one replica; `compress` makes it.

    Attributes:
        is_dense: True if gradients are all-reduced without a codec: for `Half`, in a job of one
            rank, or because a rank would not send fewer bytes by messages.
        sent_bytes: bytes of gradients that this rank has sent so far, without headers.

    Args:
        replica: the wrapped model.
        codec: the codec, the same on all ranks.
        scaler: the GradScaler of the loss, or None.
    """

    def __init__(
        self,
        replica: DistributedDataParallel,
        codec: Codec | Half,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.sent_bytes = 0
        self._group = replica.process_group
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._name, self._scaler = str(codec), scaler
        self._parameters = dict(replica.module.named_parameters())
        self._names = {id(one): name for name, one in self._parameters.items()}
        self._numbers = {name: number for number, name in enumerate(self._parameters)}
        # The unsent part of each gradient: flat, in memory order, without the loss scale.
        self._left: dict[str, Tensor] = {}
        self._pending: list[_Pending] = []
        self._steps = 0
        self._scale = 1.0
        self.is_dense = True
        if isinstance(codec, Half):
            return
        self._codec = codec
        trained = [one for one in self._parameters.values() if one.requires_grad]
        whole = sum(one.numel() * one.element_size() for one in trained)
        coded = sum(self._size_bytes(one.numel(), _precise(one.dtype)) for one in trained)
        # With P ranks in a ring, each rank sends a whole gradient 2 (P - 1) / P times, and a
        # message P - 1 times. A job of one rank sends nothing.
        self.is_dense = self._ranks == 1 or coded * self._ranks >= 2 * whole

    def state_dict(self) -> dict[str, Any]:
        """State of this rank that a restart needs; every rank must save its own state."""
        left = {name: self._shaped(name, flat) for name, flat in self._left.items()}
        return {"place": self._place, "steps": self._steps, "left": left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that this rank saved.

        Args:
            state: what `state_dict` returned.

        Raises:
            ConfigError: the state is of another rank, number of ranks, codec or model. Nothing is
                changed then.
        """
        if state["place"] != self._place:
            raise ConfigError(
                f"the state is of {state['place']}, and this is {self._place}; save and load one "
                f"in each rank, or start without"
            )
        shapes = {name: one.shape for name, one in self._parameters.items()}
        for name, left in state["left"].items():
            if shapes.get(name) != left.shape:
                raise ConfigError(
                    f"the state is of another model: {name} has the shape {tuple(left.shape)} "
                    f"there, and here {tuple(shapes[name]) if name in shapes else 'is none'}"
                )
        self._steps = state["steps"]
        self._left = {name: self._flat(name, left) for name, left in state["left"].items()}

    @property
    def _place(self) -> str:
        return f"{self._name} on rank {self._rank} of {self._ranks}"

    def _shaped(self, name: str, flat: Tensor) -> Tensor:
        """Copy flat numbers into the shape and the memory layout of a parameter."""
        shaped = torch.empty_like(self._parameters[name], dtype=flat.dtype, requires_grad=False)
        shaped.as_strided(flat.shape, (1,)).copy_(flat)
        return shaped

    def _flat(self, name: str, shaped: Tensor) -> Tensor:
        like = self._parameters[name]
        copy = torch.empty_like(like, dtype=shaped.dtype, requires_grad=False).copy_(shaped)
        return copy.as_strided((like.numel(),), (1,))

    def _size_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Bytes of a parameter's gradient in a message: plain if encoding would save nothing."""
        return min(self._codec.size_bytes(count, dtype.itemsize), count * dtype.itemsize + 7 & ~7)

    def _is_coded(self, count: int, dtype: torch.dtype) -> bool:
        return self._codec.size_bytes(count, dtype.itemsize) < count * dtype.itemsize

    def start(self, bucket: GradBucket) -> None:
        """Start the exchange of a bucket."""
        buffer = bucket.buffer()
        if self.is_dense:
            # Gradients in 16 bits are sent as they are.
            is_halved = self._name == str(Half()) and buffer.dtype.itemsize > 2
            summed = buffer.bfloat16() if is_halved else buffer
            work = dist.all_reduce(summed, group=self._group, async_op=True)
            self._pending.append(_Pending(work, (), summed, {}))
            self.sent_bytes += 2 * (self._ranks - 1) * summed.nbytes // self._ranks
            return
        if self._scaler is not None:
            self._scale = self._scaler.get_scale()
        parts, left = [], {}
        for name, part in self._parts(bucket):
            whole = part.to(_precise(part.dtype), copy=True).div_(self._scale)
            if name in self._left:
                whole += self._left[name]
            if not self._is_coded(len(whole), whole.dtype):
                parts.append(nn.functional.pad(whole.view(torch.uint8), (0, -whole.nbytes % 8)))
                continue
            parts.append(self._codec.encode(whole, self._chance(name, whole.device)))
            if self._codec.has_feedback:
                self._codec.add_(parts[-1], whole, alpha=-1)
                left[name] = whole
        message = torch.cat(parts)
        messages = [torch.empty_like(message) for _ in range(self._ranks)]
        work = dist.all_gather(messages, message, group=self._group, async_op=True)
        self._pending.append(_Pending(work, messages, buffer, left))
        self.sent_bytes += (self._ranks - 1) * len(message)

    def finish(self, buckets: Sequence[GradBucket], unused: Set[int]) -> None:
        """Wait for the exchanges of all buckets, and average the gradients.

        Args:
            buckets: all buckets of the step, in the order in which their exchanges began.
            unused: ids of the parameters that no rank has used in this step.
        """
        unused_names = {self._names[one] for one in unused}
        is_finite: list[Tensor] = []
        left: dict[str, Tensor] = {}
        for bucket, one in zip(buckets, self._pending, strict=True):
            one.work.wait()
            buffer = bucket.buffer()
            if one.messages:
                self._average(bucket, one.messages, unused_names)
            else:
                buffer.copy_(one.summed).div_(self._ranks)
            is_finite.append(buffer.isfinite().all())
            left |= {name: part for name, part in one.left.items() if name not in unused_names}
        # All ranks have the same averages. If one is not finite, as when a scaled loss overflows,
        # GradScaler skips this step. Then this step's messages have no effect, and `_left` must
        # stay as it was before the step.
        if left and torch.stack(is_finite).all():
            self._left |= left
        self._pending.clear()
        self._steps += 1

    def _average(
        self, bucket: GradBucket, messages: Sequence[Tensor], unused_names: Set[str]
    ) -> None:
        """Write the mean of all messages into the buffer, adding up in the order of the ranks."""
        place = 0
        for name, part in self._parts(bucket):
            total = torch.zeros_like(part, dtype=_precise(part.dtype))
            size = self._size_bytes(len(total), total.dtype)
            for message in messages:
                coded = message[place : place + size]
                if self._is_coded(len(total), total.dtype):
                    self._codec.add_(coded, total)
                else:
                    total += coded[: total.nbytes].view(total.dtype)
            place += size
            # A gradient may be a view of the buffer. That of an unused parameter must not change.
            if name not in unused_names:
                part.copy_(total.mul_(self._scale)).div_(self._ranks)

    def _parts(self, bucket: GradBucket) -> Iterator[tuple[str, Tensor]]:
        """Name and flat gradient of each parameter of a bucket, in the order of its buffer."""
        parameters = bucket.parameters()
        parts = bucket.buffer().split([one.numel() for one in parameters])
        return zip((self._names[id(one)] for one in parameters), parts, strict=True)

    def _chance(self, name: str, device: torch.device) -> torch.Generator:
        """Generator seeded by step, rank and parameter: a restart draws the same random numbers."""
        place = (self._steps * self._ranks + self._rank) * len(self._numbers) + self._numbers[name]
        return torch.Generator(device).manual_seed(place)


class Exchange(Protocol):
    """Contract of the state of a hook: it exchanges each bucket while backward goes on."""

    def start(self, bucket: GradBucket) -> None:
        """Start the exchange of a bucket."""

    def finish(self, buckets: Sequence[GradBucket], unused: Set[int]) -> None:
        """Write the exchanged gradients into all buckets of a step.

        Args:
            buckets: these buckets, in the order in which their exchanges began.
            unused: ids of the parameters that no rank has used in this step, whose gradients DDP
                does not write. Empty if `register` was not asked for them.
        """


def register(replica: DistributedDataParallel, exchange: Exchange, *, keeps_unused: bool) -> None:
    """Make DDP exchange the gradients of a replica by `exchange`.

    Args:
        replica: the wrapped model.
        exchange: what exchanges the gradients.
        keeps_unused: True if `exchange` must know which parameters no rank has used in a step.

    Raises:
        ConfigError: the replica has a communication hook already.
    """
    step = _Step(replica, exchange)
    try:
        replica.register_comm_hook(step, _exchange)
    except RuntimeError as error:
        raise ConfigError(
            "this replica has a communication hook already; make a new DistributedDataParallel"
        ) from error
    # In a static graph, a parameter that is not used in the first step is never used.
    if keeps_unused and replica.find_unused_parameters and not replica.static_graph:
        step.watch(replica.module)


class _Step:
    """State of the hook: which buckets of a step have come, and which parameters are not used.

    Args:
        replica: the wrapped model.
        exchange: what exchanges the gradients.
    """

    def __init__(self, replica: DistributedDataParallel, exchange: Exchange) -> None:
        self._exchange, self._group = exchange, replica.process_group
        self._may_skip = replica.skip_all_reduce_unused_params
        # `GradBucket.is_last` does not tell when a step ends: in the first step of a static graph,
        # DDP gives every bucket the number 0.
        self._count = replica._get_ddp_logging_data()["num_parameter_tensors"]
        self._buckets: list[tuple[GradBucket, torch.futures.Future[torch.Tensor]]] = []
        self._came: list[Tensor] = []
        self._watched: frozenset[int] = frozenset()
        # Those of the watched parameters that this rank has not used since the last exchange.
        self._idle: set[int] = set()

    def watch(self, model: nn.Module) -> None:
        """Note from now on which parameters of a model are used, also in `no_sync`, as DDP does."""
        idle, trained = self._idle, [one for one in model.parameters() if one.requires_grad]
        for one in trained:
            one.register_post_accumulate_grad_hook(lambda used: idle.discard(id(used)))
        self._watched = frozenset(map(id, trained))
        idle.update(self._watched)

    def start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket, and finish all if it is the last one to come."""
        device = bucket.buffer().device
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )
        if self._may_skip and not self._came:
            # DDP calls no hook for a bucket of unused parameters. It waits after this callback.
            Variable._execution_engine.queue_callback(self._finish)
        self._exchange.start(bucket)
        self._buckets.append((bucket, future))
        self._came += bucket.parameters()
        if len(self._came) == self._count:
            self._finish()
        return future

    def _finish(self) -> None:
        if self._came:
            unused = self._unused() if self._watched else frozenset()
            self._exchange.finish([bucket for bucket, _ in self._buckets], unused)
            for bucket, future in self._buckets:
                future.set_result(bucket.buffer())
            self._buckets.clear()
            self._came.clear()

    def _unused(self) -> Set[int]:
        """Ids of the parameters that no rank has used; all ranks find the same ones."""
        used = [id(one) not in self._idle for one in self._came]
        counts = torch.tensor(used, dtype=torch.int32, device=self._came[0].device)
        dist.all_reduce(counts, group=self._group)
        self._idle.update(self._watched)
        pairs = zip(self._came, counts.tolist(), strict=True)
        return {id(one) for one, count in pairs if count == 0}


def _exchange(state: _Step, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook; DDP requires that its second parameter has the name `bucket`."""
    return state.start(bucket)


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Dtype for encoding and error feedback: 16 bits would lose small parts that were left out."""
    return torch.float64 if dtype == torch.float64 else torch.float32
