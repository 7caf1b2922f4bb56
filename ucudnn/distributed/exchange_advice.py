"""Choose a way to exchange gradients in a data-parallel job, from times alone; nothing is run here.

Ways are ordered by their harm: torch's own way, the same gradients in other buckets, rounded
gradients, other gradients, other training. A way is advised only if its gain over less harmful ways
is larger than the error of their times. Other training is mentioned but never advised, because its
effect on the accuracy is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, islice
from typing import Any

from ucudnn.errors import ConfigError, quoted
from ucudnn.solvers import Contention, Curve, Link, bucket, overlap
from ucudnn.units import format_bytes, format_ns
from ucudnn.verdict import HOPED_GAIN, TOLD_GAIN, TOLD_PREDICTED_GAIN

HARM = ("as it is", "same gradients", "rounded gradients", "other gradients", "other training")
# The caps of buckets in torch's DistributedDataParallel in MiB: of the first bucket, and of all
# later ones.
DEFAULT_CAPS = (1.0, 25.0)
_MIB = 1 << 20
# The smallest message whose time is measured.
SMALLEST_BYTES = 4096
# Fewer buckets are chosen if the last exchange ends later by at most this part of a step's
# computing time.
_SLACK = 0.01
# Two ways of other training: parameters are averaged every `PERIOD` steps, or the gradients of
# `BATCHES` batches are added up before a step.
PERIOD, BATCHES = 8, 4
_FACTORS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_RATES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
_LINK = re.compile(r"\s*([\d.]+)\s*(ns|us|ms|s)\s*,\s*([\d.]+)\s*([kMG]?B|[MG]bit)/s\s*")


def parse_link(text: str) -> Link:
    """Read a link as a person writes it: the latency and the rate of a message.

    >>> parse_link("30us,1.25GB/s")
    Link(latency_ns=30000.0, per_byte_ns=0.8)

    Args:
        text: latency in ns, us, ms or s; rate in B/s, kB/s, MB/s, GB/s, Mbit/s or Gbit/s.

    Raises:
        ConfigError: the text does not have this form.
    """
    match = _LINK.fullmatch(text)
    try:
        latency, rate = (float(match[1]), float(match[3])) if match else (0.0, 0.0)
    except ValueError:  # such as two points in a number
        rate = 0.0
    if match is None or not rate:
        raise ConfigError(f"a link is LATENCY,RATE such as 30us,1.25GB/s, got {quoted(text)}")
    return Link(latency * _FACTORS[match[2]], 1e9 / (rate * _RATES[match[4]]))


@dataclass(frozen=True, slots=True)
class Coded:
    """A compression of gradients, with its costs in a step.

    Args:
        name: for people; exchange_times.py also finds the codec by this name.
        code: line of a training script that switches it on.
        harm: index into `HARM`.
        ratio: bytes of a message, divided by those of the gradients.
        encode_ns: time to encode all gradients of a step.
        decode_ns: time to decode all messages of a step.
        is_gathered: True if each rank gets all messages; else an all-reduce adds them up.
    """

    name: str
    code: str
    harm: int
    ratio: float
    encode_ns: int
    decode_ns: int
    is_gathered: bool = True


_NONE = Contention()


@dataclass(frozen=True, slots=True)
class Profile:
    """Times of a data-parallel job: of a step on its slowest rank, and of its link.

    Args:
        ranks: number of ranks of the job.
        sizes: bytes of each gradient, in the order in which they are ready.
        ready_ns: time from the beginning of the step until each gradient is ready.
        compute_ns: time of a step without any exchange.
        reduce: time of an all-reduce as a function of its bytes.
        gather: time of an all-gather as a function of the bytes of one rank's message.
        contention: how much exchanges and computing slow each other down.
        coded: the compressions to choose from.
        can_cut: True if torch has `bucket_cap_mb_list`, and all gradients are of one dtype.
        after_ns: time that an exchange takes longer than by itself if it outlasts computing; ranks
            do not end computing at the same moment.
    """

    ranks: int
    sizes: tuple[int, ...]
    ready_ns: tuple[int, ...]
    compute_ns: int
    reduce: Curve
    gather: Curve
    contention: Contention = _NONE
    coded: tuple[Coded, ...] = ()
    can_cut: bool = True
    after_ns: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(self.sizes)

    def faster(self, factor: float) -> Profile:
        """The profile of the same job if computing a step were `factor` times as fast."""
        ready = tuple(round(time_ns / factor) for time_ns in self.ready_ns)
        return replace(self, ready_ns=ready, compute_ns=round(self.compute_ns / factor))

    def fitted(
        self, counts: Sequence[int], computed_ns: int, exchanged_ns: int, in_turn_ns: int
    ) -> Profile:
        """The profile with times that were measured in the same rounds as steps.

        Args:
            counts: number of gradients in each bucket.
            computed_ns: time of a step without any exchange.
            exchanged_ns: time of exchanging the buckets one after the other.
            in_turn_ns: time of computing a step, then exchanging the buckets.
        """
        factor = exchanged_ns / max(1, sum(map(self.reduce.time_ns, self.bucket_bytes(counts))))
        times_ns = tuple(round(factor * time_ns) for time_ns in self.reduce.times_ns)
        return replace(
            self.faster(self.compute_ns / computed_ns),
            reduce=replace(self.reduce, times_ns=times_ns),
            after_ns=max(0, in_turn_ns - computed_ns - exchanged_ns),
        )

    def bucket_bytes(self, counts: Sequence[int]) -> list[int]:
        """Bytes of each bucket."""
        sizes = iter(self.sizes)
        return [sum(islice(sizes, count)) for count in counts]

    def step_ns(self, counts: Sequence[int], coded: Coded | None = None) -> int:
        """Time of a step whose gradients are exchanged in buckets, while backward goes on.

        Args:
            counts: number of gradients in each bucket.
            coded: compression; None: gradients are sent as they are.
        """
        ready = [self.ready_ns[end - 1] for end in accumulate(counts)]
        sizes = self.bucket_bytes(counts)
        curve = self.gather if coded and coded.is_gathered else self.reduce
        ratio, encode, decode = (
            (coded.ratio, coded.encode_ns, coded.decode_ns) if coded else (1, 0, 0)
        )
        parts = [size / self.total_bytes for size in sizes]
        # Encoding a bucket delays everything that backward computes after it.
        delayed = [time_ns + round(encode * sum(parts[: n + 1])) for n, time_ns in enumerate(ready)]
        arrived, computed = overlap(
            delayed,
            [curve.time_ns(round(ratio * size)) for size in sizes],
            self.compute_ns + encode,
            self.contention,
        )
        # The messages of a bucket are added up when they have arrived and backward has ended.
        end = computed
        for time_ns, part in zip(arrived, parts, strict=True):
            after_ns = self.after_ns if time_ns > computed else 0
            end = max(end, time_ns + after_ns) + round(decode * part)
        return end


@dataclass(frozen=True, slots=True)
class ExchangeWay:
    """One way to exchange gradients.

    Args:
        name: for people.
        harm: index into `HARM`.
        predicted_ns: predicted time of a step.
        sent_bytes: bytes that each rank sends in a step.
        code: what to write in a training script; "": nothing.
        caps_mb: caps of the buckets in MiB; empty: torch's own caps.
        measured_ns: measured time of a step; 0: no step was run.
        noise: part of a step; gains over torch's own way that are smaller than it are noise.
    """

    name: str
    harm: int
    predicted_ns: int
    sent_bytes: int
    code: str = ""
    caps_mb: tuple[float, ...] = ()
    measured_ns: int = 0
    noise: float = 0.0


def capped(sizes: Sequence[int], caps_mb: Sequence[float]) -> list[int]:
    """Count the gradients in each bucket of DDP: a bucket ends with the gradient that fills it.

    >>> capped([1 << 20] * 5, [1, 2])
    [1, 2, 2]

    Args:
        sizes: bytes of each gradient.
        caps_mb: cap of each bucket in MiB; the last cap is also that of all later buckets.
    """
    counts: list[int] = []
    count = filled = 0
    for size in sizes:
        count, filled = count + 1, filled + size
        if filled >= int(caps_mb[min(len(counts), len(caps_mb) - 1)] * _MIB):
            counts.append(count)
            count = filled = 0
    return [*counts, count] if count else counts


def ways(profile: Profile, caps_mb: Sequence[float] = ()) -> list[ExchangeWay]:
    """The ways to exchange gradients, with predicted times of a step; the first is torch's own.

    The second has buckets with these caps; without caps, the fastest buckets.
    """
    ranks, total = profile.ranks, profile.total_bytes
    ring_bytes = 2 * (ranks - 1) * total // ranks
    counts = capped(profile.sizes, DEFAULT_CAPS)
    step_ns = profile.step_ns(counts)
    found = [ExchangeWay("as torch does it", 0, step_ns, ring_bytes)]
    found += [_cut(profile, caps_mb or _fastest_caps(profile), ring_bytes)]
    for one in profile.coded:
        size = round(one.ratio * total)
        sent = (ranks - 1) * size if one.is_gathered else 2 * (ranks - 1) * size // ranks
        found.append(ExchangeWay(one.name, one.harm, profile.step_ns(counts, one), sent, one.code))
    average_ns = profile.compute_ns + profile.reduce.time_ns(total) // PERIOD
    found += [
        ExchangeWay(
            f"average parameters every {PERIOD} steps",
            4,
            average_ns,
            ring_bytes // PERIOD,
            f"PeriodicModelAverager(period={PERIOD}).average_parameters(model.parameters()) after "
            f"each step, without DistributedDataParallel",
        ),
        ExchangeWay(
            f"{BATCHES} batches in each step",
            4,
            ((BATCHES - 1) * profile.compute_ns + step_ns) // BATCHES,
            ring_bytes // BATCHES,
            f"replica.no_sync() around {BATCHES - 1} of {BATCHES} batches",
        ),
    ]
    return found


def _cut(profile: Profile, caps: Sequence[float], ring_bytes: int) -> ExchangeWay:
    """The way with buckets of these caps in MiB."""
    counts = capped(profile.sizes, caps)
    name = "all in one bucket" if len(counts) == 1 else f"{len(counts)} buckets"
    caps_code = f"bucket_cap_mb_list={[*caps]}" if profile.can_cut else f"bucket_cap_mb={caps[0]}"
    code = f"DistributedDataParallel(model, {caps_code})"
    return ExchangeWay(name, 1, profile.step_ns(counts), ring_bytes, code, tuple(caps))


def _fastest_caps(profile: Profile) -> list[float]:
    """The caps in MiB of the fastest buckets that this version of torch can make."""
    if profile.can_cut:
        # Fewer buckets may be slower by a little slack, because each bucket has costs that the
        # prediction leaves out.
        slack_ns = round(_SLACK * profile.compute_ns)
        best = bucket(profile.ready_ns, profile.sizes, profile.reduce, slack_ns)
        return [size / _MIB for size in best.sizes]
    # All buckets must have one cap: try powers of two, up to one bucket for all gradients.
    most = profile.total_bytes.bit_length()
    trials = [[2.0**n / _MIB] for n in range(12, most + 1)] or [[1.0]]
    return min(trials, key=lambda one: profile.step_ns(capped(profile.sizes, one)))


@dataclass(frozen=True, slots=True)
class ExchangeAdvice:
    """Advice for a data-parallel job: the cost of waiting for gradients, and the way that pays.

    `print(advice)` shows the sentences.

    Args:
        profile: times of the job.
        ways: all ways to exchange gradients; the first is torch's own.
    """

    profile: Profile
    ways: tuple[ExchangeWay, ...]

    @property
    def error(self) -> float:
        """Relative error of the predicted time of torch's own step; 0 if that step was not run."""
        own = self.ways[0]
        return abs(own.predicted_ns / own.measured_ns - 1) if own.measured_ns else 0.0

    @property
    def chosen(self) -> ExchangeWay:
        """The way that is advised."""
        chosen = self.ways[0]
        for harm in range(1, len(HARM) - 1):
            rivals = [way for way in self.ways if way.harm == harm]
            # If some of these ways were measured, those that were not measured are left out,
            # because they were predicted to be slower.
            rivals = [way for way in rivals if way.measured_ns] or rivals
            best = max(rivals, key=lambda way: self.gain(way, chosen), default=chosen)
            if self.gain(best, chosen) > self.told(best, chosen):
                chosen = best
        return chosen

    @property
    def other_training(self) -> ExchangeWay | None:
        """The fastest way that changes the training, if it is faster than the advised way."""
        ways, chosen = [way for way in self.ways if way.harm == len(HARM) - 1], self.chosen
        best = min(ways, key=lambda way: way.predicted_ns, default=chosen)
        return best if self.gain(best, chosen) > self.told(best, chosen) else None

    def gain(self, way: ExchangeWay, over: ExchangeWay) -> float:
        """The time that one way saves over another, as a fraction of the other one's step."""
        if way.measured_ns and over.measured_ns:
            return 1 - way.measured_ns / over.measured_ns
        return 1 - way.predicted_ns / over.predicted_ns

    def told(self, way: ExchangeWay, over: ExchangeWay) -> float:
        """The smallest gain of one way over another that exceeds noise and prediction errors."""
        if way.measured_ns and over.measured_ns:
            return max(TOLD_GAIN, way.noise, over.noise)
        if not self.ways[0].measured_ns:
            return TOLD_PREDICTED_GAIN
        return max(TOLD_GAIN, 2 * self.error)

    def worth_measuring(self) -> list[ExchangeWay]:
        """For each harm the way predicted to be fastest, if it gains more than 1 % over torch's."""
        own, found = self.ways[0], []
        for harm in range(1, len(HARM) - 1):
            rivals = [way for way in self.ways if way.harm == harm]
            best = min(rivals, key=lambda way: way.predicted_ns, default=own)
            # The least gain for measuring a way is smaller than that for advising it, because the
            # prediction may underestimate a gain.
            if self.gain(best, own) > HOPED_GAIN:
                found.append(best)
        return found

    @property
    def bucket_cap_mb_list(self) -> list[float] | None:
        """Argument for DistributedDataParallel, if other buckets are advised; else None."""
        return [*self.chosen.caps_mb] or None

    @property
    def verdict(self) -> str:
        """Recommendation in one sentence."""
        own, chosen = self.ways[0], self.chosen
        if chosen is own:
            return "leave it as it is: no other way is faster beyond the error of this advice."
        way = _times(own, chosen)
        harm = {
            1: "the gradients stay the same",
            2: "gradients are rounded",
            3: "gradients are others, so compare the accuracy",
        }[chosen.harm]
        return f"{chosen.name}, {way}; {harm}: {chosen.code}"

    def sentences(self) -> list[str]:
        """Sentences on waiting, the link, errors, plans and other training; last the verdict."""
        profile, own = self.profile, self.ways[0]
        kind, step_ns = ("takes", own.measured_ns) if own.measured_ns else ("would take", 0)
        step_ns = step_ns or own.predicted_ns
        waited = max(0, step_ns - profile.compute_ns)
        predicted = "" if own.measured_ns else " (predicted)"
        step = (
            f"On {profile.ranks} ranks a step {kind} {format_ns(step_ns)}{predicted}; "
            f"{format_ns(waited)} of it wait for gradients, {waited / step_ns:.0%}."
        )
        sizes = SMALLEST_BYTES, min(profile.reduce.sizes[-1], profile.total_bytes)
        link = " and ".join(
            f"{format_ns(profile.reduce.time_ns(size))} for {format_bytes(size)}" for size in sizes
        )
        slower = profile.contention.computing
        link += f"; computing takes {slower:.2f} times as long meanwhile" if slower > 1 else ""
        gradients = format_bytes(profile.total_bytes)
        found = [step, f"Gradients have {gradients}. An all-reduce takes {link}."]
        if own.measured_ns:
            found.append(
                f"The model predicts {format_ns(own.predicted_ns)} for this step; it cannot tell "
                f"gains below {max(TOLD_GAIN, 2 * self.error):.0%}."
            )
        else:
            found.append(f"Nothing was sent: gains below {TOLD_PREDICTED_GAIN:.0%} are not told.")
        faster = replace(self, profile=profile.faster(1.2))._own_ns()
        found.append(
            f"A plan that makes computing 1.2 times as fast makes this step "
            f"{self._own_ns() / faster:.2f} times as fast."
        )
        other = self.other_training
        if other is not None:
            found.append(
                f"Another training, {other.name}, is predicted to take "
                f"{format_ns(other.predicted_ns)} for a step; compare the accuracy: {other.code}."
            )
        return [*found, f"Verdict: {self.verdict}"]

    def _own_ns(self) -> int:
        return self.profile.step_ns(capped(self.profile.sizes, DEFAULT_CAPS))

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each way: name, harm, bytes sent, predicted step, measured step."""
        return [
            (
                way.name,
                HARM[way.harm],
                format_bytes(way.sent_bytes),
                format_ns(way.predicted_ns),
                format_ns(way.measured_ns) if way.measured_ns else "-",
            )
            for way in self.ways
        ]

    def to_dict(self) -> dict[str, Any]:
        """All numbers as JSON values, with the verdict."""
        return asdict(self) | {
            "error": self.error,
            "chosen": asdict(self.chosen),
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        return "\n".join(self.sentences())


def _times(own: ExchangeWay, chosen: ExchangeWay) -> str:
    if own.measured_ns and chosen.measured_ns:
        return f"with which a step is {own.measured_ns / chosen.measured_ns:.2f} times as fast"
    ratio = own.predicted_ns / chosen.predicted_ns
    return f"with which a step is predicted to be {ratio:.2f} times as fast"
