"""Elastic averaging and delayed gradients: ranks do not wait for the exchange of each step.

Both methods change the training: results differ from those of one process. The simplest method of
this kind is local SGD, which torch implements as `PeriodicModelAverager`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from ucudnn.distributed.agreement import require_equal
from ucudnn.distributed.compression import register
from ucudnn.distributed.rendezvous import Rendezvous
from ucudnn.errors import ConfigError, quoted
from ucudnn.solvers._base import require_int


class ElasticAverager:
    """Let each rank train by itself, and move its parameters to a common centre every few steps.

    Call `step` after each step of the optimizer, on all ranks. Every `period` steps a rank moves
    its parameters by `alpha` of the way to the centre, and the centre moves by `beta` of the way to
    the mean of all ranks. Buffers of floating point, such as those of BatchNorm, move likewise; the
    state of the optimizer stays on its rank. The model may get other dtypes, devices and layouts at
    any time, on all ranks.

    Synchronous elastic averaging SGD: Zhang, Choromanska, LeCun, NeurIPS 2015.

    >>> from torch.distributed import HashStore
    >>> dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> averager = ElasticAverager(model, period=1, alpha=0.5, beta=0.25)
    >>> _ = nn.init.ones_(model.weight)  # a step of an optimizer
    >>> averager.step()
    >>> model.weight.item(), averager.centre["weight"].item()
    (0.5, 0.25)
    >>> dist.destroy_process_group()

    Args:
        model: the model, not wrapped, the same on all ranks.
        period: steps from one exchange to the next.
        alpha: a rank's part of the way, above 0 and at most 1; None: `beta` / number of ranks.
        beta: the centre's part of the way, above 0 and at most 1.
        timeout_s: seconds to wait for another rank.

    Attributes:
        centre: tensors of the centre by name, the same on all ranks.

    Raises:
        ConfigError: the model is wrapped in DDP, or a number is out of range.
        RankError: ranks have different settings, or do not arrive.
    """

    def __init__(
        self,
        model: nn.Module,
        period: int = 4,
        alpha: float | None = None,
        beta: float = 0.9,
        timeout_s: float = 300.0,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            raise ConfigError(
                "DistributedDataParallel averages gradients in every step; pass the model that is "
                "not wrapped"
            )
        require_int("period", period, 1)
        for name, value in (("alpha", alpha), ("beta", beta)):
            is_number = isinstance(value, float | int) and 0 < value <= 1
            if not is_number and (name, value) != ("alpha", None):
                raise ConfigError(f"{name} must be above 0 and at most 1, got {quoted(value)}")
        if not dist.is_initialized():
            raise ConfigError(
                "elastic averaging takes a job of ranks; call distributed.init() first"
            )
        with Rendezvous("elastic averaging", None, timeout_s) as rendezvous:
            facts = {"period": str(period), "alpha": str(alpha), "beta": str(beta)}
            require_equal(rendezvous.exchange("settings", facts))
        self._period, self._beta = period, beta
        self._alpha = beta / dist.get_world_size() if alpha is None else alpha
        self._steps = 0
        self._model = model
        # Contiguous, because a broadcast copies memory, and each rank may have a layout of its own.
        self.centre = {
            name: one.clone(memory_format=torch.contiguous_format)
            for name, one in _tensors(model).items()
        }
        # On all ranks, the centre starts with the tensors of rank 0.
        for one in self.centre.values():
            dist.broadcast(one, 0)

    @torch.no_grad()
    def step(self) -> None:
        """Count a step, and exchange parameters at every `period`-th step."""
        self._steps += 1
        if self._steps % self._period:
            return
        tensors = self._followed()
        first_names = _first_names(tensors)
        for dtype in dict.fromkeys(one.dtype for one in tensors.values()):
            names = [n for n in dict.fromkeys(first_names.values()) if tensors[n].dtype == dtype]
            mean = torch.cat([tensors[name].flatten() for name in names])
            dist.all_reduce(mean)
            parts = mean.div_(dist.get_world_size()).split([tensors[n].numel() for n in names])
            for name, part in zip(names, parts, strict=True):
                own, centre = tensors[name], self.centre[name]
                own.lerp_(centre, self._alpha)
                self.centre[name] = centre.lerp(part.view_as(centre), self._beta)
        self.centre = {name: self.centre[first] for name, first in first_names.items()}

    @torch.no_grad()
    def finish(self) -> None:
        """After the last step, copy the centre, which is what was trained, into the model."""
        for name, one in self._followed().items():
            one.copy_(self.centre[name])

    def _followed(self) -> dict[str, Tensor]:
        """The model's tensors as they are now, after the centre took over their dtypes and devices.

        Raises:
            ConfigError: names or shapes of the model have changed.
        """
        tensors = _tensors(self._model)
        if changed := _different(tensors, self.centre):
            raise ConfigError(
                f"the model has changed since the averager was made: names or shapes differ in "
                f"{changed}; make a new averager"
            )
        for name, one in tensors.items():
            self.centre[name] = self.centre[name].to(one)
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """State that a restart needs; each rank must also save the state of its model."""
        self._followed()
        return {"steps": self._steps, "centre": dict(self.centre)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state: what `state_dict` returned.

        Raises:
            ConfigError: the state is of another model; nothing is changed.
        """
        tensors = self._followed()
        if changed := _different(state["centre"], tensors):
            raise ConfigError(f"the state is of another model: names or shapes differ in {changed}")
        self._steps = state["steps"]
        # In the dtypes of the state: the model may get them later, and a detour would lose digits.
        self.centre = {
            name: state["centre"][name].to(
                one.device, copy=True, memory_format=torch.contiguous_format
            )
            for name, one in tensors.items()
        }


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of floating point; a shared one under each of its names."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: one.detach() for name, one in named if one.is_floating_point()}


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name, the first name of a tensor with the same memory."""
    # `load_state_dict(assign=True)` may make two tensors of a shared one, with one memory or two.
    firsts: dict[Any, str] = {}
    return {
        name: firsts.setdefault((one.data_ptr(), one.shape, one.stride()), name)
        for name, one in tensors.items()
    }


def _different(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> str:
    """Names that only one of both has, or that have two shapes, quoted; empty if there are none."""
    shapes = [{name: one.shape for name, one in named.items()} for named in (some, others)]
    names = {name for name, _ in shapes[0].items() ^ shapes[1].items()}
    return quoted(sorted(names)) if names else ""


def delay(replica: DistributedDataParallel, steps: int = 1, timeout_s: float = 300.0) -> None:
    """Apply gradients some steps late, so that their exchange runs during these steps.

    Call it on all ranks before the first step. The first gradients are zeros, and the last ones are
    never applied. A gradient that arrives in a step in which no rank uses its parameter waits for
    the next step that uses it. If a `GradScaler` is used, its scale must not change.

    A parameter server whose gradients are always as stale as allowed does the same: Ho et al.,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013.

    >>> from torch.distributed import HashStore
    >>> dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> replica = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    >>> delay(replica)
    >>> for value in (5.0, 7.0):
    ...     replica.zero_grad()
    ...     replica(torch.full((1, 1), value)).sum().backward()
    ...     replica.module.weight.grad.item()
    0.0
    5.0
    >>> dist.destroy_process_group()

    Args:
        replica: the wrapped model, without another communication hook.
        steps: number of steps by which gradients are late; 0: none, as in plain DDP.
        timeout_s: seconds to wait for another rank.

    Raises:
        ConfigError: the model is not wrapped or has a hook already, or `steps` is not 0, 1, ...
        RankError: ranks have different `steps`, or do not arrive.
    """
    require_int("steps", steps, 0)
    if not isinstance(replica, DistributedDataParallel):
        raise ConfigError(
            f"delay takes a model wrapped in DistributedDataParallel, got {type(replica).__name__}"
        )
    with Rendezvous("delay", replica.process_group, timeout_s) as rendezvous:
        require_equal(rendezvous.exchange("steps", {"steps of delay": str(steps)}))
    register(replica, _Delayed(replica, steps), keeps_unused=steps > 0)


class _Delayed:
    """State of the hook: buckets in exchange, and gradients that have arrived but must wait."""

    def __init__(self, replica: DistributedDataParallel, steps: int) -> None:
        self._group, self._steps = replica.process_group, steps
        # For each of the last `steps` steps, and this one.
        self._sent: deque[list[tuple[Any, Tensor, list[Tensor]]]] = deque([[]])
        self._unused: deque[Set[int]] = deque()
        self._waiting: dict[int, Tensor] = {}

    def start(self, bucket: GradBucket) -> None:
        """Start the exchange of a bucket."""
        copy = bucket.buffer() / dist.get_world_size(self._group)
        work = dist.all_reduce(copy, group=self._group, async_op=True)
        self._sent[-1].append((work, copy, bucket.parameters()))

    def finish(self, buckets: Sequence[GradBucket], unused: Set[int]) -> None:
        """Wait for the exchanges begun `steps` steps ago, and give their gradients to DDP.

        Args:
            buckets: all buckets of this step.
            unused: ids of the parameters that no rank has used in this step.
        """
        self._unused.append(unused)
        if len(self._sent) > self._steps:
            # The gradient of a parameter that was not used then is an older one, which stayed.
            old = self._unused.popleft()
            for work, copy, parameters in self._sent.popleft():
                work.wait()
                for one, part in _parts(copy, parameters):
                    if id(one) in old:
                        continue
                    # A copy, so that what waits long does not keep the memory of its bucket.
                    late = part.clone() if id(one) in unused else part
                    waiting = self._waiting.get(id(one))
                    self._waiting[id(one)] = late if waiting is None else waiting + late
        for bucket in buckets:
            # DDP changes its buckets after the first step. So the gradient of a parameter may have
            # been sent in another bucket than the one in which DDP expects it now.
            for one, part in _parts(bucket.buffer(), bucket.parameters()):
                if id(one) not in unused:
                    waiting = self._waiting.pop(id(one), None)
                    part.zero_() if waiting is None else part.copy_(waiting)
        self._sent.append([])


def _parts(flat: Tensor, parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter with its part of a bucket."""
    return zip(parameters, flat.split([one.numel() for one in parameters]), strict=True)
