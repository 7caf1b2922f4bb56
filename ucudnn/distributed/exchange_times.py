"""Measure a data-parallel job: when gradients are ready, the link, and steps in several ways.

All ranks measure at the same time, as they will run, and the slowest rank counts.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import accumulate, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.distributed.agreement import raise_errors, require_equal
from ucudnn.distributed.codecs import Codec, Half, OneBit, Stochastic, TopK
from ucudnn.distributed.compression import compress
from ucudnn.distributed.exchange_advice import (
    DEFAULT_CAPS,
    SMALLEST_BYTES,
    Coded,
    ExchangeAdvice,
    ExchangeWay,
    Profile,
    capped,
    parse_link,
    ways,
)
from ucudnn.distributed.rendezvous import Rendezvous
from ucudnn.errors import ConfigError, UcudnnError, first_line
from ucudnn.execution.compiling import original_of
from ucudnn.solvers import Contention, Curve
from ucudnn.solvers._base import require_int
from ucudnn.solvers.collectives import gather, line, ring
from ucudnn.steps.copying import copied
from ucudnn.steps.run import STEP_ERRORS, reason_against_steps, run_step, undisturbed

# Seconds for the steps without exchange, for the steps by several ways, and for each of the other
# timings. Below them the smallest and the largest number of rounds.
_COMPUTING_S, _RACING_S, _TIMING_S = 10.0, 60.0, 1.0
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 50
# Number of sizes at which the link is timed.
_SIZES = 6
# The most exchanges in turn that are run beside a step.
_MOST_EXCHANGES = 1000
# All-gathers are timed up to this part of the bytes of an all-reduce. Most messages of compressions
# are about as large or smaller.
_CODED_PART = 32
# The codecs that `advise` tries, each with its index into `HARM`.
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
    With `ranks` and `link` nothing is sent, one process is enough, and the times of steps with an
    exchange are predicted.

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
        # A process group of this rank alone, so that its steps wait for no other rank.
        alone = dist.new_subgroups(group_size=1)[0] if dist.is_initialized() else None
        watched, sizes = _prepared(meeting, model, example_inputs, alone)
        if ranks is not None and given is not None:
            curves = [line(one, ranks, given) for one in (ring, gather)]
        else:
            # Before steps are timed, because malloc keeps blocks of a size once it has seen them.
            curves = _link(meeting, tuple(sizes.values()), watched.device)
        profile = _computing(meeting, watched, sizes, *curves)
        if ranks is not None:
            profile = replace(profile, ranks=ranks)
        else:
            profile = replace(profile, contention=_contention(meeting, profile, watched))
        profile = replace(profile, coded=_coded(meeting, model, profile))
        advice = ExchangeAdvice(profile, tuple(ways(profile)))
        if is_live:
            advice = _raced(meeting, advice, model, example_inputs, watched)
        if alone is not None:
            del watched
            dist.destroy_process_group(alone)
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
        self.device = next(model.parameters()).device
        self.dtypes = {one.dtype for one in model.parameters() if one.requires_grad}
        for name, parameter in twin.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note(name))

    def _note(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            del parameter
            self._moments[name] = Moment(self.device.type)

        return note

    def run(self) -> None:
        """Run a step."""
        run_step(self._model, self._inputs)
        self._model.zero_grad()

    def step(self) -> tuple[dict[str, int], int]:
        """Run a step; return the times in ns until each gradient is ready, and until its end."""
        self._moments.clear()
        _wait(self.device.type)
        start = Moment(self.device.type)
        self.run()
        end = Moment(self.device.type)
        _wait(self.device.type)
        ready = {name: moment.since_ns(start) for name, moment in self._moments.items()}
        return ready, end.since_ns(start)


def _wait(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()


def _aligned(meeting: Rendezvous) -> None:
    """Wait until all ranks are ready to begin."""
    if len(meeting.ranks) > 1:
        dist.barrier()


def _prepared(
    meeting: Rendezvous, model: nn.Module, inputs: Any, alone: dist.ProcessGroup | None
) -> tuple[_Watched, dict[str, int]]:
    """A copy whose steps can be watched, and the bytes of its gradients as they become ready.

    Raises:
        RankError: a rank cannot compute a step, or ranks have different gradients.
    """
    error: str | None = "the model has no gradient"
    watched, ready = None, dict[str, int]()
    trained = [one for one in model.parameters() if one.requires_grad]
    try:
        if trained:
            error = reason_against_steps(model, inputs, trained[0].device.type) or None
        if error is None:
            watched = _Watched(model, inputs, alone)
            # A second step shows whether DDP misses gradients of the first one.
            ready, _ = watched.step()
            watched.step()
            error = None if ready else "no gradient of the model is computed"
    except (*STEP_ERRORS, UcudnnError) as caught:
        error = first_line(caught)
    raise_errors(meeting.exchange("errors", error))
    assert watched is not None  # else `raise_errors` has raised
    sizes = {name: one.nbytes for name, one in model.named_parameters() if name in ready}
    digest = sha256(repr(sorted(sizes.items())).encode()).hexdigest()[:8]
    said = f"{len(sizes)} of {sum(sizes.values())} bytes, with the hash {digest}"
    require_equal(meeting.exchange("gradients", {"list of gradients": said}))
    # DDP orders gradients as they become ready on the first rank.
    order = meeting.exchange("order", sorted(sizes, key=ready.__getitem__))[meeting.ranks[0]]
    return watched, {name: sizes[name] for name in order}


def _computing(
    meeting: Rendezvous, watched: _Watched, sizes: Mapping[str, int], reduce: Curve, gather: Curve
) -> Profile:
    """Measure when gradients are ready, in steps of all ranks without an exchange."""
    slowest = max(meeting.exchange("first", watched.step()[1]).values())
    mine = []
    for _ in range(_rounds(_COMPUTING_S, slowest)):
        _aligned(meeting)
        mine.append(watched.step())
    # For each round, the steps of all ranks, that of the first rank first.
    rounds = list(zip(*meeting.exchange("steps", mine).values(), strict=True))
    middle = {name: median_ns([one[0][0][name] for one in rounds]) for name in sizes}
    order = sorted(middle, key=middle.__getitem__)
    ready = [median_ns([max(step[0][name] for step in one) for one in rounds]) for name in order]
    can_cut = "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters
    return Profile(
        len(meeting.ranks),
        tuple(sizes[name] for name in order),
        tuple(accumulate(ready, max)),
        median_ns([max(step[1] for step in one) for one in rounds]),
        reduce,
        gather,
        can_cut=can_cut and len(watched.dtypes) == 1,
    )


def _rounds(budget_s: float, step_ns: int) -> int:
    return min(_MOST_ROUNDS, max(_LEAST_ROUNDS, int(budget_s * 1e9 / max(1, step_ns))))


def _link(meeting: Rendezvous, sizes: Sequence[int], device: torch.device) -> list[Curve]:
    """Times of all-reduces and of all-gathers by their bytes, for gradients of these sizes."""

    def reduce(size: int) -> Callable[[], object]:
        data = torch.zeros(size, dtype=torch.uint8, device=device).view(torch.float32)
        return lambda: dist.all_reduce(data)

    def gather(size: int) -> Callable[[], object]:
        data = torch.zeros(size, dtype=torch.uint8, device=device)
        messages = [torch.empty_like(data) for _ in meeting.ranks]
        return lambda: dist.all_gather(messages, data)

    # Exchanges are timed up to the largest bucket of torch, and messages of compressions up to a
    # part of it.
    counts, places = capped(sizes, DEFAULT_CAPS), iter(sizes)
    largest = max(sum(islice(places, count)) for count in counts)
    curves = []
    for collective, part in ((reduce, 1), (gather, _CODED_PART)):
        # Each size is the same multiple of the size before it.
        most = max(largest // part, 2 * SMALLEST_BYTES)
        ratio = (most / SMALLEST_BYTES) ** (1 / (_SIZES - 1))
        timed = [int(SMALLEST_BYTES * ratio**n) // 8 * 8 for n in range(_SIZES)]
        # One size after the other, because TCP slows down after smaller messages.
        times = [
            _slowest(
                meeting,
                f"{collective.__name__} of {size} bytes",
                [partial(_timed, collective(size), device.type)],
            )[0]
            for size in timed
        ]
        # If a message seems to take less time than a smaller one, that is noise.
        curves.append(Curve(tuple(timed), tuple(accumulate(map(median_ns, times), max))))
    return curves


def _contention(meeting: Rendezvous, profile: Profile, watched: _Watched) -> Contention:
    """Measure how much exchanges and computing slow each other down."""
    device, curve, computing_ns = watched.device, profile.reduce, profile.compute_ns
    # One exchange that takes at least as long as computing a step, or the largest that was
    # measured, as often as it fits into that time.
    enough = [size for size in curve.sizes if curve.time_ns(size) >= computing_ns]
    size = min(enough, default=curve.sizes[-1])
    count = min(_MOST_EXCHANGES, -(-computing_ns // max(1, curve.time_ns(size))))
    messages = [torch.zeros(size // 4, device=device) for _ in range(2)]
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    ended: list[int] = []

    def exchange_pair() -> None:
        works = [dist.all_reduce(one, async_op=True) for one in messages]
        for work in works:
            work.wait()

    def exchange_in_turn() -> Moment:
        if stream is not None:
            torch.cuda.set_device(device)  # a new thread would use the first GPU
        # In a stream of its own, the end of the exchanges is noted without waiting for computing.
        with torch.cuda.stream(stream):
            for _ in range(count):
                dist.all_reduce(messages[0])
            return Moment(device.type)

    def exchange_beside() -> int:
        _wait(device.type)
        start = Moment(device.type)
        with ThreadPoolExecutor(1) as thread:
            exchanged = thread.submit(exchange_in_turn)
            watched.run()
            computed = Moment(device.type)
        _wait(device.type)
        ended.append(exchanged.result().since_ns(start))
        return computed.since_ns(start)

    timers: list[Callable[[], int]] = [
        partial(_timed, exchange_pair, device.type),
        partial(_timed, watched.run, device.type),
        partial(_timed, exchange_in_turn, device.type),
        exchange_beside,
        ended.pop,
    ]
    times = _slowest(meeting, "contention", timers)
    pair_ns, *others = map(median_ns, times)
    return Contention.measured(pair_ns * count / others[1], *others)


def _timed(run: Callable[[], object], device_type: str) -> int:
    """Time in ns that a run takes, until the moment that it returns, if it returns one."""
    _wait(device_type)
    start = Moment(device_type)
    found = run()
    end = found if isinstance(found, Moment) else Moment(device_type)
    _wait(device_type)
    return end.since_ns(start)


def _slowest(
    meeting: Rendezvous,
    topic: str,
    timers: Sequence[Callable[[], int]],
    budget_s: float = _TIMING_S,
) -> list[list[int]]:
    """Call timers in turn, in all ranks at once; return the slowest rank's time by timer and round.

    Two more rounds come first and do not count: the first of them opens connections and allocates
    memory, and after it DDP arranges its buckets anew. The second one tells how many rounds take
    `budget_s`.
    """

    def run_round() -> list[int]:
        times = []
        for timer in timers:
            _aligned(meeting)
            times.append(timer())
        return times

    run_round()
    slowest = max(meeting.exchange(f"round of {topic}", sum(run_round())).values())
    rounds = [run_round() for _ in range(_rounds(budget_s, slowest))]
    received = meeting.exchange(topic, list(zip(*rounds, strict=True)))
    return [
        [max(one) for one in zip(*ranks, strict=True)]
        for ranks in zip(*received.values(), strict=True)
    ]


def _coded(meeting: Rendezvous, model: nn.Module, profile: Profile) -> tuple[Coded, ...]:
    """Costs of the compressions that make a step send less; all ranks time them at once."""
    whole = [torch.randn_like(one).flatten() for one in model.parameters() if one.requires_grad]
    precise = [one if one.dtype == torch.float64 else one.float() for one in whole]
    total = sum(one.nbytes for one in whole)
    found: list[Coded] = []
    # For each compression that was found: its encoding and its decoding.
    runs: list[Callable[[], object]] = []
    for name, (codec, harm) in _CODECS.items():
        code = f"distributed.compress(replica, distributed.{codec})"
        if isinstance(codec, Half):
            ratio = 2 / whole[0].itemsize
            if ratio < 1:
                found.append(Coded(name, code, harm, ratio, 0, 0, is_gathered=False))
                # The conversion back copies as many bytes, so it is assumed to take as long.
                runs += [lambda: [one.bfloat16() for one in whole]] * 2
            continue
        size = sum(codec.size_bytes(one.numel(), one.itemsize) for one in precise)
        if size * profile.ranks < 2 * total:
            found.append(Coded(name, code, harm, size / total, 0, 0))
            messages = [codec.encode(one) for one in precise]
            runs += [partial(_encode, codec, precise), partial(_decode, codec, messages, precise)]
    timers = [partial(_timed, run, whole[0].device.type) for run in runs]
    times = _slowest(meeting, "codecs", timers)
    costs = [median_ns(taken) for taken in times]
    return tuple(
        # A rank decodes the messages of all ranks if they are gathered.
        replace(one, encode_ns=encode, decode_ns=decode * (profile.ranks if one.is_gathered else 1))
        for one, encode, decode in zip(found, costs[::2], costs[1::2], strict=True)
    )


def _encode(codec: Codec, gradients: Sequence[Tensor]) -> None:
    # What the hook does beside encoding is timed, too: error feedback, and division by the loss
    # scale.
    for one in gradients:
        corrected = one.clone().div_(1.0).add_(one)
        message = codec.encode(corrected)
        if codec.has_feedback:
            codec.add_(message, corrected, alpha=-1)


def _decode(codec: Codec, messages: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for message, one in zip(messages, gradients, strict=True):
        codec.decode(message, one)


def _raced(
    meeting: Rendezvous, advice: ExchangeAdvice, model: nn.Module, inputs: Any, watched: _Watched
) -> ExchangeAdvice:
    """The advice with measured steps, by torch's own way and the ways worth measuring.

    Computing and exchanges by themselves are timed in the same rounds, and steps are predicted anew
    from these times, because the speed of the machine and of the link changes.
    """
    worth: list[ExchangeWay] = meeting.exchange("worth", advice.worth_measuring())[meeting.ranks[0]]
    # All ranks use the numbers of the first rank.
    advice = meeting.exchange("predicted", advice)[meeting.ranks[0]]
    profile, rivals = advice.profile, [advice.ways[0], *worth]
    counts = capped(profile.sizes, DEFAULT_CAPS)
    messages = [
        torch.zeros(size // 4, device=watched.device) for size in profile.bucket_bytes(counts)
    ]

    def exchange() -> None:
        for one in messages:
            dist.all_reduce(one)

    def compute_and_exchange() -> None:
        watched.run()
        exchange()

    parts = (watched.run, exchange, compute_and_exchange)
    timers = [
        *(partial(_timed, run, watched.device.type) for run in parts),
        *(partial(_timed_step, *replica_by(model, inputs, way)) for way in rivals),
    ]
    times = _slowest(meeting, "race", timers, _RACING_S)
    profile = profile.fitted(counts, *map(median_ns, times[: len(parts)]))
    steps = times[len(parts) :]
    found = {way.name: way for way in ways(profile, advice.ways[1].caps_mb)}
    for way, samples in zip(rivals, steps, strict=True):
        ratio, _, high = ratio_interval(samples, steps[0])
        found[way.name] = replace(
            found[way.name], measured_ns=median_ns(samples), noise=high - ratio
        )
    return ExchangeAdvice(profile, tuple(found.values()))


def _timed_step(replica: DistributedDataParallel, batch: Any) -> int:
    """Time in ns of a step; its gradients are removed afterwards."""
    device_type = next(replica.parameters()).device.type
    taken_ns = _timed(lambda: run_step(replica, batch), device_type)
    replica.zero_grad()
    return taken_ns


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
