"""Advice: the verdict on steps that are made up, and what real steps are said to take."""

from __future__ import annotations

import copy
import json
import random
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import ucudnn
from ucudnn.advice import Advice, KernelAdvice, Largest
from ucudnn.backends import open_backend
from ucudnn.backends.torch_cpu.backend import TorchCpuBackend
from ucudnn.config import Config
from ucudnn.errors import ConfigError
from ucudnn.measurement import Device
from ucudnn.outcomes import Way
from ucudnn.plan import Timing
from ucudnn.problem import Problem
from ucudnn.segment import Segment, StepDivision
from ucudnn.steps.foresee import largest_batch

MIB, MS = 1 << 20, 1_000_000


def timing(ms, workspace=0):
    return Timing(int(ms * MS), 0, int(workspace * MIB), 3)


def kernel(ms, workspace=0.0, last_ms=None, direct_ms=1.0, size=9, calls=1):
    return KernelAdvice(
        problem=Problem("fprop", 2, 2, 2, (size, size), (1, 1)),
        layers=("layer",) * calls,
        timing=timing(ms, workspace),
        channels_last=None if last_ms is None else timing(last_ms, workspace / 8),
        direct_ns=int(direct_ms * MS),
        least_ns=int(direct_ms * MS / 2),
    )


OWN = Way("torch", "as it is", 1000 * MIB, time_ns=100 * MS, rounds=5)
SEGMENTS = StepDivision((Segment("layers", 4),))
WHOLE_MODEL = StepDivision((Segment("", 8),))


def way(name, peak, ratio, rounds=5, **fields):
    """One that was timed in turn, or once if the ratio is a number."""
    if isinstance(ratio, tuple):
        fields |= {"rounds": rounds, **dict(zip(("ratio", "low", "high"), ratio, strict=True))}
        ratio = ratio[0]
    kind = "torch"
    if "division" in fields:
        kind = "segments" if fields["division"].micro_batch is None else "loop"
    return Way(kind, name, peak * MIB, time_ns=int(ratio * OWN.time_ns), **fields)


def advice(*ways, kernels=(), **fields):
    ways = (OWN, *ways)
    return Advice(tuple(kernels), Device("cpu", "made up"), ways, batch=16, **fields)


def channels_last(ratio, peak=1000):
    return way("channels_last", peak, ratio, memory_format="channels_last")


def test_nothing_is_faster_or_smaller():
    found = advice(channels_last((1.0, 0.97, 1.05)), kernels=[kernel(2, 1), kernel(3, 2)])
    assert found.verdict.startswith("leave it as it is: ")
    assert found.fastest is found.smallest is None


def test_a_way_that_is_faster_beyond_the_noise_is_advised():
    half = way("micro-batches of 8", 400, (0.52, 0.5, 0.55), division=WHOLE_MODEL)
    found = advice(channels_last((0.8, 0.75, 0.85)), half)
    assert found.verdict == (
        "run it in micro-batches of 8 (tune does): a step then takes 0.52 (0.50 to 0.55) times as "
        "long and 400 MiB instead of 1000 MiB."
    )


def test_of_ways_whose_intervals_overlap_the_smaller_one_is_advised():
    fast, small = way("fast", 900, (0.7, 0.6, 0.8)), way("small", 500, (0.75, 0.7, 0.9))
    for ways in ((fast, small), (small, fast)):
        assert advice(*ways).fastest == small
    apart = way("small", 500, (0.85, 0.82, 0.9))
    assert advice(fast, apart).fastest == fast


def test_noise_is_no_verdict():
    noisy = channels_last((0.8, 0.5, 1.1))
    assert advice(noisy).verdict == (
        "too noisy to tell whether channels_last is faster: 0.80 (0.50 to 1.10) times as long as "
        "it is."
    )
    assert advice(replace(noisy, rounds=2)).verdict.startswith("too few steps to tell")
    # an interval that may hide a gain, whatever its middle
    assert advice(channels_last((1.0, 0.5, 2.1))).verdict.startswith("too noisy to tell")
    # What was run once may be faster by chance; other ways were timed in turn and are not.
    once = way("loop of 4", 1000, 0.8)
    assert advice(once).verdict.startswith("too few steps to tell whether loop of 4")
    assert advice(once, channels_last((1.0, 0.98, 1.02))).verdict.startswith("leave it")


def test_a_way_that_takes_less_memory_is_advised_with_its_price():
    small = way("segments", 300, 1.1, division=SEGMENTS)
    assert advice(small, way("checkpoints", 700, 1.0)).verdict == (
        "if memory is short, tune it with memory_budget='30%': 300 MiB instead of 1000 MiB at "
        "about 1.10 times the time."
    )
    # the smallest of all would cost too much
    loop = way("loop of 1", 100, 2.0, division=StepDivision((), 1))
    assert "memory_budget='30%'" in advice(small, loop).verdict
    assert advice(loop).verdict == (
        "if memory is short, train in a loop of micro-batches of 1 (tune it with loop=True): 100 "
        "MiB instead of 1000 MiB at about 2.00 times the time."
    )
    # what is advised for its time saves as much
    fast = way("micro-batches of 8", 300, (0.5, 0.5, 0.6))
    assert "if memory" not in advice(fast, small).verdict


def test_nothing_was_tried():
    found = advice(left_out=("channels_last (no time)",))
    assert found.verdict == "not known: nothing but the step as it is was run."
    assert "Not tried: channels_last (no time)." in found.sentences()


def test_a_cliff_that_costs_a_tenth_of_the_step():
    found = advice(kernels=[kernel(2, 1), kernel(11, 1)])
    assert [one.is_cliff() for one in found.kernels] == [False, True]
    assert found.verdict == (
        "tune it without a limit: 1 kernel is on a cliff, which costs up to 10% of the step."
    )
    # the same cliff in a step in which it hardly counts
    slow = replace(found, ways=(replace(OWN, time_ns=1000 * MS),))
    assert slow.verdict.startswith("leave it")


def test_a_cliff_that_another_layout_shows():
    found = advice(kernels=[kernel(20, last_ms=8, direct_ms=5)])
    assert found.kernels[0].is_cliff()
    assert "up to 12% of the step" in found.verdict  # 20 ms that need be 8
    # no bound is known on a device whose speed nobody measured
    assert kernel(20, last_ms=8, direct_ms=0).is_cliff()
    # a cliff by the roofline costs nothing that another layout would save
    assert kernel(20, last_ms=30, direct_ms=1).excess_ns() == 0


def test_a_limit_that_few_kernels_exceed():
    few = [kernel(4, 400), *[kernel(4, 3.5, calls=4)] * 4]
    found = advice(kernels=few, own_peak_bytes=600 * MIB).with_plan()
    assert found.suggested_limit == 4 * MIB
    assert found.how(found.ways[-1]) == "tune it with workspace_limit='4MiB'"
    assert found.ways[-1].most_bytes == 604 * MIB
    assert "tune it with workspace_limit='4MiB': 604 MiB instead of 1000 MiB" in found.verdict
    # where workspace is little of the peak, and where nothing is known of it
    assert advice(kernels=few, own_peak_bytes=990 * MIB).suggested_limit is None
    assert advice(kernels=few).suggested_limit is None


def test_no_verdict_contradicts_what_is_known():
    chance = random.Random(0)

    def drawn(name):
        middle = chance.choice((0.5, 0.8, 0.97, 1.0, 1.2, 2.0))
        ends = chance.uniform(0.5, 1) * middle, chance.uniform(1, 1.5) * middle
        ratio = chance.choice((middle, (middle, *ends)))
        return way(name, chance.choice((100, 600, 900, 1100)), ratio, chance.randint(1, 7))

    for _ in range(2000):
        kernels = [kernel(chance.choice((2, 11)), chance.choice((1, 300))) for _ in range(3)]
        found = advice(
            *map(drawn, "abc"[: chance.randint(0, 3)]),
            kernels=kernels,
            own_peak_bytes=chance.choice((0, 600, 1000)) * MIB,
        ).with_plan()
        said = found.verdict
        assert ("leave it as it is" in said) == (
            found.fastest is None and found.smallest is None and not re.search("cliff|tell", said)
        )
        assert ("times as long and" in said) == (found.fastest is not None)
        assert "tell" not in said or found.fastest is None
        assert "tell" not in said or "cliff" not in said
        assert found.sentences()[0] == f"Verdict: {said}"


def test_where_compiling_wins_the_verdict_says_how():
    compiled = {"division": StepDivision(compiled=1.0)}
    found = advice(way("compiled in channels_last", 630, (0.64, 0.6, 0.68), **compiled))
    assert found.verdict == (
        "let a plan compile it (tune it with compile='auto'): a step then takes 0.64 (0.60 to "
        "0.68) times as long and 630 MiB instead of 1000 MiB."
    )
    last = replace(found.ways[-1], memory_format="channels_last")
    assert (
        found.how(last) == "let a plan compile it (tune it with compile='auto' and layout='auto')"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_steps_are_tried(model, monkeypatch):
    monkeypatch.setattr("ucudnn.steps.advise._LEAST_COMPILED_NS", 0)
    x = torch.randn(4, 3, 12, 12)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, _: graph.forward)
    found = ucudnn.advise(copy.deepcopy(model), x)
    [compiled] = [one for one in found.ways if one.division.compiled is not None]
    assert compiled.name.startswith("compiled")
    assert compiled.peak_bytes
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda *_: 1 / 0)
    torch._dynamo.reset()
    found = ucudnn.advise(model, x)
    assert not any(one.division.compiled is not None for one in found.ways)
    assert any(one.startswith("compiled (torch.compile failed") for one in found.left_out)


def test_the_verdict_comes_first_and_all_fits_a_screen():
    names = ["channels_last", *(f"segments, {n}% of the peak" for n in range(11))]
    found = advice(
        *(way(name, 500, 1.0) for name in names),
        kernels=[kernel(2)] * 400,
        causes=(("parameters", 100 * MIB), ("activations", 800 * MIB), ("workspace", 100 * MIB)),
        load=1.5,
        left_out=("checkpoint per block (no time)",) * 3,
    )
    lines = str(found).splitlines()
    assert lines[0].startswith("Verdict: ")
    assert len(lines) <= 26
    assert "800 MiB of activations (80%), " in lines[1]
    assert any(line.startswith("Times are noisy: others used 1.5 processors") for line in lines)
    assert all(len(line) <= 80 for line in lines if line.startswith(("segments", "channels_last")))


def test_kernels_that_were_not_timed_are_counted():
    late = KernelAdvice(kernel(1).problem, ("late",), None, None, 0, 0)
    found = Advice((kernel(3), late), Device("cpu", "made up"), reason="out of memory")
    assert ", 1 not timed" in found.sentences()[-1]
    assert "No step was run: out of memory." in found.sentences()
    assert found.share(late.time_ns()) == 0
    assert json.loads(json.dumps(found.to_dict()))["kernels"][1]["timing"] is None


def test_the_largest_batch_in_a_budget():
    found = advice(
        way("segments", 500, 1.2, division=SEGMENTS),
        way("loop of 4", 200, 1.0, division=StepDivision((), 4)),
        budget_bytes=800 * MIB,
        largest={
            "as it is": Largest(12, 800 * MIB, 60 * MS),
            "segments": Largest(40, 790 * MIB, 400 * MS),
            "loop of 4": Largest(90, 800 * MIB, 900 * MS),
        },
    )
    assert found.verdict == (
        "the largest batch within 800 MiB is ~40: tune it with memory_budget='800MiB'; 790 MiB and "
        "10.0 ms per sample, estimated. As it is, ~12 fit at 5.00 ms per sample. By a loop of 4 "
        "~90 fit at 10.0 ms per sample."
    )
    assert "is ~90: tune it with loop=True and memory_budget='800MiB'; 800 MiB and" in (
        replace(found, ways=found.ways[2:]).verdict
    )
    none = replace(found, ways=(OWN,), largest={"as it is": Largest(0, 900 * MIB, 0)})
    assert none.verdict == (
        "not even one sample fits 800 MiB by any way that was tried; the smallest peak at batch "
        "16 is 1000 MiB."
    )


def test_the_largest_batch_is_exact_where_peaks_are_a_line():
    chance = random.Random(0)
    for _ in range(500):
        fixed, slope, budget = chance.randint(0, 99), chance.randint(1, 9), chance.randint(0, 999)
        fitting = [batch for batch in range(1, 1000) if fixed + slope * batch <= budget]
        calls = []

        def peak_at(batch, fixed=fixed, slope=slope, calls=calls):
            calls.append(batch)
            return fixed + slope * batch

        batch, peak = largest_batch(peak_at, chance.randint(1, 64), budget)
        assert batch == max(fitting, default=0)
        assert peak == (fixed + slope * batch if fitting else 0)
        # The begin, the next one, where both lead to, and its neighbour; two to spare.
        assert len(calls) <= 6


def test_autocast_that_is_emulated_is_left_out():
    found = advice(way("float32", 1900, 0.05), channels_last((0.5, 0.4, 0.6)))
    assert found.verdict == (
        "leave autocast out: a step in float32 takes 0.05 times as long, 5.00 ms instead of 100 ms."
    )
    # At less than ten times the time, it is one way among others.
    one = way("float32", 900, (0.11, 0.1, 0.12))
    assert advice(one).faster_float32 is None
    assert advice(one).verdict == (
        "leave autocast out: a step then takes 0.11 (0.10 to 0.12) times as long and 900 MiB "
        "instead of 1000 MiB."
    )
    assert advice(one, channels_last((0.05, 0.04, 0.06))).verdict.startswith("use channels_last")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Conv2d(8, 8, 3))


def block(channels):
    return nn.Sequential(nn.Conv2d(8, channels, 3), nn.GELU(), nn.Conv2d(channels, 8, 3), nn.GELU())


class Blocks(nn.Module):
    """Four of them, whose samples do not depend on each other."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([block(8), block(16), block(16), block(8)])

    def forward(self, x):
        for one in self.blocks:
            x = one(x)
        return x


def peak_of(net, x, step):
    """Peak of a step that is written by hand, with what is there before it."""
    net = copy.deepcopy(net)
    step(net, x)
    net.zero_grad()
    span = open_backend("torch_cpu").span(lambda: step(net, x))
    held = [*net.parameters(), *net.buffers(), x]
    return span.peak_bytes + sum(one.nbytes for one in held)


def by_torch(net, x):
    # The result is alive while gradients are computed, as it is in most training loops.
    y = net(x)
    y.abs().sum().backward()


def in_a_loop(size, net, x):
    for part in x.split(size):
        by_torch(net, part)


def by_checkpoints(net, x):
    for one in net.blocks:
        x = checkpoint(one, x, use_reentrant=False)
    x.abs().sum().backward()


def in_inference_at_once(net, x):
    with torch.no_grad():
        net(x)


def in_inference(size, net, x):
    with torch.no_grad():
        result = torch.empty(len(x), 8, 24, 24)
        for at in range(0, len(x), size):
            result[at : at + size] = net(x[at : at + size])


@pytest.mark.slow
def test_peaks_are_those_of_steps_that_are_written_by_hand():
    torch.manual_seed(0)
    net, x = Blocks(), torch.randn(16, 8, 40, 40)
    found = ucudnn.advise(net, x)
    own = peak_of(net, x, by_torch)
    assert found.step_peak_bytes == pytest.approx(own, rel=0.02)
    assert sum(size for _, size in found.causes) == found.step_peak_bytes
    ways = {one.name: one for one in found.ways}
    loop = next(one for one in found.ways if one.kind == "loop")
    size = loop.division.micro_batch
    by_hand = peak_of(net, x, lambda net, x: in_a_loop(size, net, x))
    assert loop.most_bytes == pytest.approx(by_hand, rel=0.05)
    by_hand = peak_of(net, x, by_checkpoints)
    assert ways["checkpoint per block"].most_bytes == pytest.approx(by_hand, rel=0.05)
    names = {one.module for one in ways["checkpoint per block"].division.segments}
    assert names == {f"blocks.{n}" for n in range(4)}
    least = min(one.most_bytes for name, one in ways.items() if name.startswith("segments"))
    assert least < 0.5 * own


@pytest.mark.slow
def test_micro_batches_of_an_inference():
    torch.manual_seed(0)
    net, x = Blocks().eval(), torch.randn(16, 8, 40, 40)
    found = ucudnn.advise(net, x, Config(ops="fprop"))
    own = peak_of(net, x, in_inference_at_once)
    assert found.step_peak_bytes == pytest.approx(own, rel=0.02)
    (part, *_) = (one for one in found.ways if one.name.startswith("micro-batches of"))
    size = part.division.segments[0].micro_batch
    by_hand = peak_of(net, x, lambda net, x: in_inference(size, net, x))
    assert part.most_bytes == pytest.approx(by_hand, rel=0.05)
    assert not found.is_training


@pytest.mark.nightly
def test_the_largest_batch_fits_the_budget_and_no_much_larger_one_does():
    torch.manual_seed(0)
    net, x = Blocks(), torch.randn(8, 8, 40, 40)
    own = peak_of(net, x, by_torch)
    found = ucudnn.advise(net, x, Config(memory_budget=3 * own))
    assert found.budget_bytes == 3 * own
    at_own = found.largest["as it is"]
    for batch, fits in ((at_own.batch, True), (round(1.1 * at_own.batch), False)):
        more = x.repeat(4, 1, 1, 1)[:batch]
        assert (peak_of(net, more, by_torch) <= 3 * own * 1.02) == fits
    answer = found.largest[found.roomiest.name]
    assert answer.batch > at_own.batch
    assert answer.peak_bytes <= 3 * own
    assert found.verdict.startswith("the largest batch within ")
    share = ucudnn.advise(net, x, Config(memory_budget="50%"))
    assert share.budget_bytes == share.step_peak_bytes // 2
    assert share.largest["as it is"].batch in (3, 4)


@pytest.mark.slow
def test_a_real_step_is_looked_at(model):
    x = torch.randn(4, 3, 12, 12, requires_grad=True)
    found = ucudnn.advise(model, x)
    assert {one.problem for one in found.kernels} == set(ucudnn.trace(model, x))
    assert all(one.timing and one.channels_last and one.direct_ns for one in found.kernels)
    assert found.step_ns > 0
    assert found.reason == ""
    ways = {one.name: one for one in found.ways}
    assert next(iter(ways)) == "as it is"
    assert ways["channels_last"].memory_format == "channels_last"
    assert not ways["plan for the convolutions"].time_ns
    # its samples depend on each other
    assert any(one.startswith("loop (") for one in found.left_out)
    values = json.loads(json.dumps(found.to_dict()))
    assert [one["name"] for one in values["ways"]] == list(ways)
    assert values["ways"][0]["segments"] == []
    assert values["ways"][0]["how"] == "leave it as it is"
    assert values["ways"][0]["peak_bytes"] == found.step_peak_bytes
    assert [one["is_estimated"] for one in values["ways"]] == [
        not one.time_ns for one in found.ways
    ]
    assert values["verdict"] == found.verdict


@pytest.mark.slow
def test_several_inputs_have_no_segments(model):
    found = ucudnn.advise(model, [torch.randn(2, 3, 12, 12), torch.randn(2, 3, 16, 16)])
    assert "segments and micro-batches (one example at a time)" in found.left_out
    assert not any(one.division.segments for one in found.ways)
    assert found.step_peak_bytes > 0


@pytest.mark.slow
def test_layouts_that_there_are_not(model):
    audio = ucudnn.advise(nn.Conv1d(2, 4, 3), torch.randn(2, 2, 9))
    last = {"memory_format": torch.channels_last}
    images = ucudnn.advise(model.to(**last), torch.randn(2, 3, 12, 12).to(**last))
    for found in (audio, images):
        assert all(one.memory_format == "keep" for one in found.ways)
        assert all(one.timing and one.channels_last is None for one in found.kernels)


def test_a_step_that_cannot_be_computed(model):
    def fail(_module, _inputs, result):
        if isinstance(result, FakeTensor):
            return
        raise RuntimeError("no step today")

    model.register_forward_hook(fail)
    found = ucudnn.advise(model, torch.randn(4, 3, 12, 12))
    assert found.reason == "one could not be computed (no step today)"
    assert found.step_ns == 0
    assert found.left_out == ()
    assert all(one.timing for one in found.kernels)


class Emulated(nn.Conv2d):
    """A convolution that is slow under autocast, by the clock that it counts itself."""

    now_ns = 0
    slow_ns = 0
    order: tuple[bool, ...] = ()

    def forward(self, x):
        y = super().forward(x)
        if not isinstance(y, FakeTensor):
            is_slow = torch.is_autocast_enabled("cpu")
            Emulated.now_ns += Emulated.slow_ns if is_slow else MS
            Emulated.order += (is_slow,)
        return y


@pytest.fixture
def clock(monkeypatch):
    """Sets how long a step under autocast takes; in float32 it takes 1 ms."""

    def elapsed_ns(_, run):
        before = Emulated.now_ns
        run()
        return max(1, Emulated.now_ns - before)

    monkeypatch.setattr(TorchCpuBackend, "elapsed_ns", elapsed_ns)

    def choose(slow_ms):
        Emulated.slow_ns, Emulated.order = int(slow_ms * MS), ()

    return choose


@pytest.mark.slow
def test_a_step_that_is_slow_under_autocast_is_run_once_after_one_in_float32(clock):
    clock(136_000)
    x = torch.randn(4, 3, 12, 12)
    with torch.autocast("cpu", torch.bfloat16):
        found = ucudnn.advise(Emulated(3, 8, 3), x)
    assert found.verdict == (
        "leave autocast out: a step in float32 takes 7.4e-06 times as long, 1.00 ms instead of "
        "136 s."
    )
    assert Emulated.order == (False, False, True)
    assert [one.name for one in found.ways] == ["as it is", "float32"]
    assert found.kernels == ()
    assert any("steps under autocast take too long" in one for one in found.left_out)
    # Without autocast there is nothing to leave out.
    assert all(one.name != "float32" for one in ucudnn.advise(Emulated(3, 8, 3), x).ways)


@pytest.mark.slow
def test_a_step_under_autocast_is_raced_with_one_in_float32(clock):
    for slow_ms, has_won in ((9, True), (0.5, False)):
        clock(slow_ms)
        with torch.autocast("cpu", torch.bfloat16):
            found = ucudnn.advise(Emulated(3, 8, 3), torch.randn(4, 3, 12, 12))
        (one,) = (one for one in found.ways if one.name == "float32")
        assert found.factor(one) == pytest.approx(1 / slow_ms)
        assert found.verdict.startswith("leave autocast out: ") is has_won
        assert found.kernels


def test_without_steps_there_is_no_word_on_autocast(clock):
    clock(136_000)
    with torch.autocast("cpu", torch.bfloat16):
        found = ucudnn.advise(Emulated(3, 8, 3), torch.randn(4, 3, 12, 12), dry=True)
    assert all(one.name != "float32" for one in found.ways)


def test_what_there_is_no_time_for_is_named(model, monkeypatch):
    monkeypatch.setattr("ucudnn.steps.advise._MOST_S", 0.0)
    found = ucudnn.advise(model, torch.randn(4, 3, 12, 12))
    assert found.step_ns > 0
    assert found.step_peak_bytes > 0
    assert {"channels_last (no time)", "checkpoint per block (no time)"} <= set(found.left_out)
    assert all(one.timing for one in found.kernels)
    # Kernels this small may look slow on a busy machine, which would be a verdict of its own.
    verdict = replace(found, kernels=()).verdict
    assert verdict == "not known: nothing but the step as it is was run."


def test_what_there_is_no_advice_on(model):
    with pytest.raises(ConfigError, match="no convolution to plan"):
        ucudnn.advise(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ConfigError, match="recording"):
        ucudnn.advise(model, torch.ones(2, 3, 12, 12), Config(backend="recorded"))
