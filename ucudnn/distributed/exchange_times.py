"""Measure a data-parallel job: when gradients are ready, the link, and steps in several ways.

All ranks measure at the same time, as they will run, and the slowest rank counts.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ucudnn.benchmark.failures import first_line
from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.distributed.agreement import raise_errors, require_equal
from ucudnn.distributed.codecs import Codec, Half, OneBit, Stochastic, TopK
from ucudnn.distributed.compression import compress
from ucudnn.distributed.exchange_advice import (
    Coded,
    ExchangeAdvice,
    ExchangeWay,
    Profile,
    parse_link,
    ways,
)
from ucudnn.distributed.rendezvous import Rendezvous
from ucudnn.errors import ConfigError, UcudnnError
from ucudnn.execution.compiling import original_of
from ucudnn.execution.copying import copied
from ucudnn.execution.stepping import (
    STEP_ERRORS,
    reason_against_steps,
    run_step,
    undisturbed,
)
from ucudnn.solvers import Line, fit
from ucudnn.solvers._base import require_int
from ucudnn.solvers.collectives import gather, line, ring

# Seconds for the steps without exchange, and for the steps by several ways. Below them the smallest
# and the largest number of rounds.
_COMPUTING_S, _RACING_S = 10.0, 30.0
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15
# Number of sizes at which the link is timed, the smallest size, and the timings per size.
_SIZES, _SMALLEST_BYTES = 6, 4096
_REPEATS = 5
# All-gathers are timed up to 1/32 of the gradients' bytes, because messages are smaller.
_CODED_PART = 32
_CODECS: dict[str, tuple[Codec | Half, int]] = {
    "gradients in bfloat16": (Half(), 2),
    "top-k, 1 %": (TopK(0.01), 3),
    "one bit": (OneBit(), 3),
    "ternary": (Stochastic(), 3),
}


def advise(
    model: nn.Module,
    example_inputs: Any,
    *,
    ranks: int | None = None,
    link: str | None = None,
    timeout_s: float = 600.0,
) -> ExchangeAdvice:
    """Measure what waiting for gradients costs, and advise a way to exchange them.

    Call it on all ranks after `init_process_group`, before or after the model is wrapped. It takes
    a minute or two. Steps are run on copies of the model: forward and backward, without optimizer.
    With `ranks` and `link` nothing is sent, one process is enough, and all steps are predicted.

    >>> advice = advise(nn.Linear(1000, 10), torch.ones(2, 1000), ranks=64, link="30us,1.25GB/s")
    >>> advice.profile.ranks, advice.sentences()[0].startswith("On 64 ranks a step would take")
    (64, True)

    Args:
        model: the same on all ranks.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs: the
            batch of one rank.
        ranks: number of ranks of a job to predict; None: measure this job.
        link: latency and rate of a message in the job to predict, such as "30us,1.25GB/s".
        timeout_s: seconds to wait for another rank.

    Raises:
        ConfigError: there is one rank and no `link`, or only one of `ranks` and `link` is given.
        RankError: ranks differ, cannot compute a step, or do not arrive.
    """
    if (ranks is None) != (link is None):
        raise ConfigError("ranks and link describe a job that is not here; give both or neither")
    is_live = ranks is None
    if is_live and not (dist.is_initialized() and dist.get_world_size() > 1):
        raise ConfigError(
            "one rank exchanges nothing; start several ranks, or give ranks and link, such as "
            "ranks=64 and link='30us,1.25GB/s'"
        )
    given = None if link is None else parse_link(link)
    if ranks is not None:
        require_int("ranks", ranks, 2)
    if isinstance(model, DistributedDataParallel):
        model = model.module
    model = original_of(model)
    with Rendezvous("advise", None, timeout_s) as meeting, undisturbed(model):
        profile = _computing(meeting, model, example_inputs)
        if ranks is not None and given is not None:
            lines = [line(one, ranks, given) for one in (ring, gather)]
            profile = replace(profile, ranks=ranks, reduce=lines[0], gather=lines[1])
        else:
            profile = _with_link(meeting, profile, next(model.parameters()).device)
        profile = replace(profile, coded=_coded(meeting, model, profile))
        advice = ExchangeAdvice(profile, tuple(ways(profile)))
        if is_live:
            advice = _raced(meeting, advice, model, example_inputs)
        # All ranks return the advice of the first rank.
        found: ExchangeAdvice = meeting.exchange("advice", advice)[meeting.ranks[0]]
    return found


class Moment:
    """A moment: on a GPU an event in the current stream, else a time of the host's clock.

    >>> Moment("cpu").since_ns(Moment("cpu")) <= 0
    True

    Args:
        device_type: "cpu" or "cuda".
    """

    def __init__(self, device_type: str) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device_type == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._time_ns = time.perf_counter_ns()

    def since_ns(self, start: Moment) -> int:
        """Time in ns since `start`; on a GPU, synchronize before this call."""
        if self._event is not None and start._event is not None:
            return int(1e6 * start._event.elapsed_time(self._event))
        return self._time_ns - start._time_ns


class _Watched:
    """A copy of a model that notes when its gradients are ready.

    In the group `alone`, which has this rank only, DDP does all its work but waits for no rank.
    """

    def __init__(self, model: nn.Module, inputs: Any, alone: dist.ProcessGroup | None) -> None:
        twin, self._inputs = copied(model, inputs)
        self._model: nn.Module = twin
        if alone is not None:
            self._model = DistributedDataParallel(twin, process_group=alone)
        self._moments: dict[str, Moment] = {}
        self._device_type = next(model.parameters()).device.type
        for name, parameter in twin.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note(name))

    def _note(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            del parameter
            self._moments[name] = Moment(self._device_type)

        return note

    def step(self) -> tuple[dict[str, int], int]:
        """Run a step; return ns from its beginning to each gradient in order, and to its end."""
        self._moments.clear()
        _wait(self._device_type)
        start = Moment(self._device_type)
        run_step(self._model, self._inputs)
        end = Moment(self._device_type)
        _wait(self._device_type)
        self._model.zero_grad()
        ready = {name: moment.since_ns(start) for name, moment in self._moments.items()}
        return ready, end.since_ns(start)


def _wait(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()


def _aligned(meeting: Rendezvous) -> None:
    """Wait until all ranks are ready to begin."""
    if len(meeting.ranks) > 1:
        dist.barrier()


def _computing(meeting: Rendezvous, model: nn.Module, inputs: Any) -> Profile:
    """Measure when gradients are ready, in steps of all ranks without an exchange.

    Raises:
        RankError: a rank cannot compute a step, or ranks have different gradients.
    """
    error: str | None = "the model has no gradient"
    watched, first = None, (dict[str, int](), 0)
    trained = [one for one in model.parameters() if one.requires_grad]
    alone = dist.new_subgroups(group_size=1)[0] if dist.is_initialized() else None
    try:
        if trained:
            error = reason_against_steps(model, inputs, trained[0].device.type) or None
        if error is None:
            watched = _Watched(model, inputs, alone)
            first = watched.step()
            error = None if first[0] else "no gradient of the model is computed"
    except (*STEP_ERRORS, UcudnnError) as caught:
        error = first_line(caught)
    raise_errors(meeting.exchange("errors", error))
    assert watched is not None  # else `raise_errors` has raised
    dtypes = {one.dtype for one in trained}
    sizes = {name: one.nbytes for name, one in model.named_parameters() if name in first[0]}
    facts = {"number of gradients": str(len(sizes)), "bytes of gradients": str(sum(sizes.values()))}
    require_equal(meeting.exchange("gradients", facts))
    slowest = max(meeting.exchange("first", first[1]).values())
    steps = []
    for _ in range(_rounds(_COMPUTING_S, slowest)):
        _aligned(meeting)
        steps.append(watched.step())
    if alone is not None:
        del watched
        dist.destroy_process_group(alone)
    ready = {name: median_ns([one[0][name] for one in steps]) for name in steps[0][0]}
    received = meeting.exchange("steps", (ready, median_ns([one[1] for one in steps])))
    # DDP uses the order of gradients on the first rank.
    order = list(received[meeting.ranks[0]][0])
    latest = [max(one[0][name] for one in received.values()) for name in order]
    can_cut = "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters
    return Profile(
        len(meeting.ranks),
        tuple(sizes[name] for name in order),
        tuple(accumulate(latest, max)),
        max(one[1] for one in received.values()),
        Line(0, 0),
        Line(0, 0),
        can_cut=can_cut and len(dtypes) == 1,
    )


def _rounds(budget_s: float, step_ns: int) -> int:
    return min(_MOST_ROUNDS, max(_LEAST_ROUNDS, int(budget_s * 1e9 / max(1, step_ns))))


def _with_link(meeting: Rendezvous, profile: Profile, device: torch.device) -> Profile:
    """The profile with a line for each collective: its time over the sizes that occur."""
    most = profile.total_bytes

    def reduce(size: int) -> Callable[[], object]:
        data = torch.zeros(size, dtype=torch.uint8, device=device).view(torch.float32)
        return lambda: dist.all_reduce(data)

    def gather(size: int) -> Callable[[], object]:
        data = torch.zeros(size, dtype=torch.uint8, device=device)
        messages = [torch.empty_like(data) for _ in meeting.ranks]
        return lambda: dist.all_gather(messages, data)

    samples = {
        "reduce": _samples(meeting, reduce, most, device.type),
        "gather": _samples(meeting, gather, most // _CODED_PART, device.type),
    }
    lines = {name: fit(taken) for name, taken in samples.items()}
    error = max(line.error(samples[name]) for name, line in lines.items())
    return replace(profile, reduce=lines["reduce"], gather=lines["gather"], link_error=error)


def _samples(
    meeting: Rendezvous,
    collective: Callable[[int], Callable[[], object]],
    most_bytes: int,
    device_type: str,
) -> list[tuple[int, int]]:
    """Sizes up to `most_bytes` in equal ratios, each with its time on the slowest rank."""
    most = max(most_bytes, 2 * _SMALLEST_BYTES)
    ratio = (most / _SMALLEST_BYTES) ** (1 / (_SIZES - 1))
    sizes = [int(_SMALLEST_BYTES * ratio**n) // 8 * 8 for n in range(_SIZES)]
    mine = []
    for size in sizes:
        run, times = collective(size), []
        for _ in range(_REPEATS + 1):
            _aligned(meeting)
            times.append(_timed(run, device_type))
        # The first run opens connections and allocates memory, so it does not count.
        mine.append(median_ns(times[1:]))
    received = meeting.exchange(f"times from {collective.__name__}", mine)
    return [(size, max(times)) for size, *times in zip(sizes, *received.values(), strict=True)]


def _timed(run: Callable[[], object], device_type: str) -> int:
    _wait(device_type)
    start = Moment(device_type)
    run()
    end = Moment(device_type)
    _wait(device_type)
    return end.since_ns(start)


def _coded(meeting: Rendezvous, model: nn.Module, profile: Profile) -> tuple[Coded, ...]:
    """Costs of the compressions that make a step send less; all ranks time them at once."""
    whole = [torch.randn_like(one).flatten() for one in model.parameters() if one.requires_grad]
    precise = [one if one.dtype == torch.float64 else one.float() for one in whole]
    total, kind = sum(one.nbytes for one in whole), whole[0].device.type
    found = []
    for name, (codec, harm) in _CODECS.items():
        code = f"distributed.compress(replica, distributed.{codec})"
        if isinstance(codec, Half):
            ratio = 2 / whole[0].itemsize
            if ratio < 1:
                # The conversion back copies as many bytes, so it is assumed to take as long.
                copy_ns = _costs(meeting, lambda: [one.bfloat16() for one in whole], kind)
                found.append(Coded(name, code, harm, ratio, copy_ns, copy_ns, is_gathered=False))
            continue
        size = sum(codec.size_bytes(one.numel(), one.itemsize) for one in precise)
        if size * profile.ranks >= 2 * total:
            continue
        messages = [codec.encode(one) for one in precise]

        def encode_all(codec: Codec = codec) -> None:
            # What the hook does besides is timed, too: error feedback, and the division by the loss
            # scale.
            for one in precise:
                corrected = one.clone().div_(1.0).add_(one)
                message = codec.encode(corrected)
                if codec.has_feedback:
                    codec.add_(message, corrected, alpha=-1)

        def decode_all(codec: Codec = codec, messages: Sequence[Tensor] = messages) -> None:
            for one, message in zip(precise, messages, strict=True):
                summed = torch.zeros_like(one)
                codec.add_(message, summed)

        encode = _costs(meeting, encode_all, kind)
        decode = profile.ranks * _costs(meeting, decode_all, kind)
        found.append(Coded(name, code, harm, size / total, encode, decode))
    received = meeting.exchange("codecs", [(one.encode_ns, one.decode_ns) for one in found])
    slowest = [
        [max(times) for times in zip(*each, strict=True)]
        for each in zip(*received.values(), strict=True)
    ]
    return tuple(
        replace(one, encode_ns=encode, decode_ns=decode)
        for one, (encode, decode) in zip(found, slowest, strict=True)
    )


def _costs(meeting: Rendezvous, run: Callable[[], object], device_type: str) -> int:
    """Median time in ns of a few runs, in all ranks at once."""
    times = []
    for _ in range(_LEAST_ROUNDS + 1):
        _aligned(meeting)
        times.append(_timed(run, device_type))
    return median_ns(times[1:])


def _raced(
    meeting: Rendezvous, advice: ExchangeAdvice, model: nn.Module, inputs: Any
) -> ExchangeAdvice:
    """The advice with measured steps, by torch's own way and the ways worth measuring."""
    worth: list[ExchangeWay] = meeting.exchange("worth", advice.worth_measuring())[meeting.ranks[0]]
    # All ranks use the numbers of the first rank.
    advice = meeting.exchange("predicted", advice)[meeting.ranks[0]]
    rivals = [advice.ways[0], *worth]
    replicas = [replica_by(model, inputs, way) for way in rivals]
    times: list[list[int]] = [[] for _ in rivals]
    rounds = _rounds(_RACING_S, sum(way.predicted_ns for way in rivals))
    device_type = next(model.parameters()).device.type
    # DDP arranges its buckets anew after the first step, so two rounds do not count.
    for number in range(rounds + 2):
        for (replica, batch), taken in zip(replicas, times, strict=True):
            _aligned(meeting)
            taken_ns = _timed(lambda one=replica, x=batch: run_step(one, x), device_type)  # type: ignore[misc]
            replica.zero_grad()
            if number >= 2:
                taken.append(taken_ns)
    received = meeting.exchange("race", times)
    # In each round, the slowest rank counts.
    slowest = [
        [max(one) for one in zip(*ranks, strict=True)]
        for ranks in zip(*received.values(), strict=True)
    ]
    measured = {}
    for way, samples in zip(rivals, slowest, strict=True):
        ratio, _, high = ratio_interval(samples, slowest[0])
        measured[way.name] = replace(way, measured_ns=median_ns(samples), noise=high - ratio)
    found = [measured.get(way.name, way) for way in advice.ways]
    return replace(advice, ways=tuple(found))


def replica_by(
    model: nn.Module, inputs: Any, way: ExchangeWay
) -> tuple[DistributedDataParallel, Any]:
    """A copy of the model that exchanges gradients in the given way, and a copy of the inputs."""
    twin, batch = copied(model, inputs)
    caps: dict[str, Any] = {}
    if len(way.caps_mb) > 1:
        caps["bucket_cap_mb_list"] = list(way.caps_mb)
    elif way.caps_mb:
        caps["bucket_cap_mb"] = way.caps_mb[0]
    replica = DistributedDataParallel(twin, **caps)
    if way.name in _CODECS:
        compress(replica, _CODECS[way.name][0])
    return replica, batch
