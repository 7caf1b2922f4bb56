"""Random networks with segments beside the same networks without: is any difference silent?

    python tests/layers/segment_trials.py 17
    python tests/layers/segment_trials.py 0 300 --without block/hooked norm/batch

A seed gives a network, its segments, and a few runs, which are the same each time. An error is
loud: it is counted, and ends the runs of these segments. A result, gradient, buffer, attribute or
random state that differs without an error is silent, even beside a warning of ucudnn: what then
runs undivided must be right.

A module that draws random numbers draws others in micro-batches. So the truth for such a segment is
the same module called for one part after another. Its samples must then not be coupled, which the
modules of `random_networks` say of themselves.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from random_networks import FrozenNorm, Network, network
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from ucudnn.errors import UcudnnError, UcudnnWarning, first_line
from ucudnn.execution.micro_batching import segment_
from ucudnn.segment import Segment
from ucudnn.steps.independence import Independence, examined
from ucudnn.steps.run import tensors_of

# Differences up to these fractions of the largest value of their kind are rounding.
_BOUND = 1e-9
_OF_ANY_MODULE = {*vars(nn.Module()), "forward", "extra_repr"}
# The segments that each network is divided into, one after another.
DIVISIONS = 3
# What torch raises for networks and inputs that it refuses.
_REFUSALS = (RuntimeError, ValueError)
# Which modules are in training mode: whether normalisations are, and whether others are.
MODES = {
    "train": (True, True),
    "eval": (False, False),
    "frozen": (False, True),
    "statistics": (True, False),
}
WAYS = ("step", "step", "twice", "functional", "flipped", "restyled", "no_grad", "inference")


def described(found: Independence, module: nn.Module, one: Segment) -> Segment:
    """A segment with what was found of its module. Nothing else here knows how that is kept."""
    if hasattr(found, "described"):
        return found.described(one)
    training = sum(each.training for each in module.modules())
    return replace(one, shared=found.shared, training=training)


@dataclass(frozen=True)
class Run:
    """One run of a network: its batch, which modules train, and what is done."""

    count: int
    mode: str
    way: str
    needs: bool
    seed: int

    @property
    def is_step(self) -> bool:
        return self.way not in {"no_grad", "inference"}


@dataclass
class Report:
    """What came of the network of a seed.

    Attributes:
        words: what happened, each at most once.
        difference: the first silent difference, in words; "" if there is none.
    """

    seed: int
    drawn: tuple[str, ...]
    segments: list[Segment] = field(default_factory=list)
    words: set[str] = field(default_factory=set)
    loud: list[str] = field(default_factory=list)
    difference: str = ""

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.difference or ', '.join(sorted(self.words))}"]
        lines += [f"    {one} (shared {one.shared}, {one.training})" for one in self.segments]
        lines += [f"    loud: {one}" for one in self.loud]
        return "\n".join([*lines, f"    {' '.join(self.drawn)}"])


def trial(seed: int, without: Collection[str] = ()) -> Report:
    """Run the network of a seed by torch and with segments, in several divisions, and compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = Report(seed, network(seed, without).drawn)
        for division in range(DIVISIONS):
            chance = random.Random(f"division {division} of {seed}")
            _try_division(report, network(seed, without), chance, without)
            if report.difference:
                break
    return report


def _try_division(
    report: Report, found: Network, chance: random.Random, without: Collection[str]
) -> None:
    """Run a network once as its segments were planned, and then in other ways."""
    # torch's own checkpoints run with the modes and parameters of backward.
    is_repeating = "block/checkpointed" in found.drawn
    without = {*without, *(["way/functional", "way/flipped"] if is_repeating else [])}
    runs = _runs(chance, without)
    report.drawn = tuple(dict.fromkeys([*report.drawn, *(f"way/{one.way}" for one in runs)]))
    try:
        _run(copy.deepcopy(found.model), found, runs[0])
    except _REFUSALS:
        report.words.add("refused by torch")
        return
    report.words.add("tried")
    twin = copy.deepcopy(found.model)
    try:
        report.segments = _segments(chance, found, runs[0])
    except (*_REFUSALS, UcudnnError) as error:
        report.words.add("error of examining")
        report.loud.append(f"examining: {first_line(error)}")
        return
    if not any(one.recompute or one.micro_batch for one in report.segments):
        report.words.add("a division refused")
    watch = _Watch(twin, report.segments)
    for one in runs:
        if not _compared(report, watch, found, one):
            break


def _runs(chance: random.Random, without: Collection[str]) -> list[Run]:
    """A step as planned, and runs with other modes, batches and ways."""
    count = chance.choice([3, 4, 4, 5, 6])
    mode = chance.choice(["train", "train", "train", "frozen", "eval"])

    def run(count: int, mode: str, way: str) -> Run:
        way = "step" if f"way/{way}" in without else way
        return Run(count, mode, way, chance.random() < 0.5, chance.getrandbits(30))

    runs = [run(count, mode, "step")]
    for _ in range(3):
        other = chance.choice([count, count, count - 1, count + 1, 2 * count, 1, 2])
        mode_now = mode if chance.random() < 0.6 else chance.choice([*MODES])
        runs.append(run(other, mode_now, chance.choice(WAYS)))
    return runs


def _segments(chance: random.Random, found: Network, first: Run) -> list[Segment]:
    """Segments that are found to be possible, of some modules."""
    model = copy.deepcopy(found.model)
    _set_mode(model, first.mode)
    modules = dict(model.named_modules())
    _seed(first.seed)
    x = found.inputs(first.count, first.needs)

    def step() -> None:
        loss = _loss(tensors_of(model(x)))
        if loss is not None:
            loss.backward()

    weights = [1 + 2 * bool([*one.children()]) for one in modules.values()]
    names = chance.choices([*modules], weights, k=chance.choice([1, 2, 2, 3, 4]))
    sizes = {name: chance.choice([1, 2, 2, 3]) for name in names}
    _seed(first.seed + 1)
    findings = examined(model, step, sizes)
    segments = []
    for name, size in sizes.items():
        selective = chance.random() < 0.3
        recompute, kept = chance.random() < 0.6, chance.choice([0, 0, 1])
        is_whole = chance.random() < 0.3
        one = findings.get(name)
        if one is not None and not one.reason and not is_whole:
            recompute = recompute and one.repeats
            kept = kept if recompute else 0
            segment = Segment(name, size, recompute=recompute, kept=kept, selective=selective)
        elif one is not None and one.repeats:
            segment = Segment(name, None, selective=selective)
        else:
            segments += [Segment(name, None, recompute=False, selective=True)]
            continue
        segments += [described(one, modules[name], segment)]
    return segments


def _set_mode(model: nn.Module, mode: str) -> None:
    norms, others = MODES[mode]
    model.train(others)
    for one in model.modules():
        if isinstance(one, _NormBase):
            one.train(norms)
    for one in model.modules():
        if isinstance(one, FrozenNorm):
            one.norm.eval()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _loss(tensors: Sequence[Tensor]) -> Tensor | None:
    """A loss that weighs each value."""
    losses = [
        (one * torch.linspace(0.1, 1, one.numel(), dtype=one.dtype).view(one.shape)).square().sum()
        for one in tensors
        if one.requires_grad
    ]
    return sum(losses[1:], losses[0]) if losses else None


# What a run leads to: values by what they are and where.
Seen = dict[str, dict[str, Any]]


def _run(
    model: nn.Module, found: Network, run: Run, on_backward: Callable[[], None] = lambda: None
) -> Seen:
    """What one run of a model computes and leaves."""
    _set_mode(model, run.mode)
    _seed(run.seed)
    x = found.inputs(run.count, run.needs and run.is_step)
    named = {
        name: (one.detach() * 1.1).requires_grad_(one.requires_grad)
        for name, one in model.named_parameters()
        if run.way == "functional"
    }
    model.zero_grad()
    contexts = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    with contexts.get(run.way, nullcontext)():
        result = functional_call(model, named, (x,)) if named else model(x)
        results = tensors_of(result)
        if run.way == "twice":
            results += tensors_of(model(x.flip(-1) * 0.5))
    values = [one.detach().clone() for one in results]
    on_backward()
    if run.way == "flipped":
        model.train(not model.training)
    if run.way == "restyled":
        for one in model.modules():
            if isinstance(getattr(one, "style", None), (Tensor, float)):
                one.style = one.style * 0.5
    loss = _loss(results) if run.is_step else None
    if loss is not None:
        loss.backward()
    parameters = {**dict(model.named_parameters()), **named, "its input": x}
    seen: Seen = {
        "result": {str(place): one for place, one in enumerate(values)},
        "gradient": {name: one.grad for name, one in parameters.items()},
        "buffer": dict(model.named_buffers()),
        "attribute": dict(_left(model)),
        "random state": {
            "torch": torch.get_rng_state(),
            "Python": hash(random.getstate()),
            "NumPy": torch.from_numpy(np.random.get_state()[1].astype(np.int64)),
        },
    }
    return {
        what: {
            name: one.detach().clone() if isinstance(one, Tensor) else one
            for name, one in values.items()
        }
        for what, values in seen.items()
    }


def _left(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What is in attributes of modules."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _OF_ANY_MODULE:
                leaves, spec = tree_flatten(value)
                yield f"{name}.{attribute}", str(spec) if leaves else ""
                for place, leaf in enumerate(leaves):
                    if isinstance(leaf, (Tensor, int, float, str)):
                        yield f"{name}.{attribute} {place}", leaf


def _differing(ours: Seen, theirs: Seen) -> str:
    """The first value that differs, and by how much; "" if there is none."""
    for what, right in theirs.items():
        values = ours[what]
        if values.keys() != right.keys():
            return f"{what}s {sorted(values.keys() ^ right.keys())} are not in both"
        sizes = [one.abs().max().item() for one in right.values() if _is_numbers(one)]
        largest = max([size for size in sizes if size < float("inf")], default=0)
        for name, one in right.items():
            if by := _deviation(values[name], one, largest):
                return f"{what} {name} differs {by}"
    return ""


def _is_numbers(one: Any) -> bool:
    return isinstance(one, Tensor) and one.is_floating_point() and one.numel() > 0


def _deviation(own: Any, right: Any, largest: float) -> str:
    if not (isinstance(right, Tensor) and isinstance(own, Tensor)):
        is_same = type(own) is type(right) and (
            abs(own - right) <= _BOUND * abs(right) if isinstance(right, float) else own == right
        )
        return "" if is_same else f"({own} for {right})"
    if own.shape != right.shape or own.dtype != right.dtype:
        return f"in shape ({[*own.shape]} for {[*right.shape]})"
    if not _is_numbers(right):
        return "" if torch.equal(own, right) else "in its values"
    if torch.allclose(own, right, rtol=_BOUND, atol=_BOUND * largest + 1e-14, equal_nan=True):
        return ""
    return f"by {(own - right).abs().max().item() / (largest or 1):.1e} of the largest"


# What a segment did, and the same again.


def _samples(args: Any, kwargs: Any) -> int:
    """Length of the first tensor with axes that is not shared."""
    kwargs = {name: one for name, one in kwargs.items() if name != "weight"}
    tensors = (one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor))
    return next((len(one) for one in tensors if one.dim()), 0)


class _Watch:
    """A model with segments; it notes in which parts its segments run."""

    def __init__(self, model: nn.Module, segments: Sequence[Segment]) -> None:
        self.model, self.segments = model, segments
        self.is_on = False
        modules = dict(model.named_modules())
        self.inner = {one.module: _Inner(self, modules[one.module]) for one in segments}
        for one in self.inner.values():
            vars(one.module).update(forward=one)
        segment_(model, segments)
        self.calls: dict[str, list[tuple[int, list[int]]]] = {}
        for name, one in self.inner.items():
            vars(one.module).update(forward=partial(self._noted, name, one.module.forward))

    def _noted(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parts = self.inner[name].parts
        before = len(parts)
        result = forward(*args, **kwargs)
        if self.is_on:
            self.calls.setdefault(name, []).append((_samples(args, kwargs), parts[before:]))
        return result

    def run(self, found: Network, run: Run) -> Seen:
        self.calls.clear()
        self.is_on = True
        try:
            return _run(self.model, found, run, partial(setattr, self, "is_on", False))
        finally:
            self.is_on = False

    def divided(self) -> list[str]:
        """The names of segments that ran in micro-batches."""
        return [
            name for name, calls in self.calls.items() if any(len(each) > 1 for _, each in calls)
        ]


@dataclass
class _Inner:
    """A module's own forward; notes the sizes of its batches."""

    watch: _Watch
    module: nn.Module
    parts: list[int] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.watch.is_on:
            self.parts.append(_samples(args, kwargs))
        return type(self.module).forward(self.module, *args, **kwargs)


class _Loop:
    """Calls a module for one part after another, in the parts that a segment had."""

    def __init__(self, module: nn.Module, calls: list[tuple[int, list[int]]]) -> None:
        self.module, self.calls = module, iter(calls)
        self.known: dict[int, list[int]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.module).forward.__get__(self.module)
        count = _samples(args, kwargs)
        found, sizes = next(self.calls, (count, self.known.get(count, [])))
        self.known[count] = sizes
        assert found == count, "a segment was called for other samples"
        if len(sizes) < 2:
            return forward(*args, **kwargs)
        start, results = 0, []
        for size in sizes:
            cut = _Cut(count, slice(start, start + size))
            results.append(forward(*cut(args), **cut(kwargs)))
            start += size
            if size == 1:
                _lay_out(results[-1])
        return _joined(results, sizes)


def _lay_out(result: Any) -> None:
    """Let gradients of one sample lie in memory as the sample does, or torch 2.13 is wrong."""
    for one in tensors_of(result):
        if one.requires_grad and not one.is_leaf:
            empty = partial(one.new_empty_strided, one.shape, one.stride())
            one.register_hook(lambda gradient, empty=empty: empty().copy_(gradient))


class _Cut:
    """Cuts what belongs to samples. The parts of one tensor are one, on which attention relies."""

    def __init__(self, count: int, where: slice) -> None:
        self.count, self.where = count, where
        self.parts: dict[int, Tensor] = {}

    def __call__(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            has_rows = tree.dim() and len(tree) == self.count
            return self.parts.setdefault(id(tree), tree[self.where]) if has_rows else tree
        if isinstance(tree, dict):
            return {name: one if name == "weight" else self(one) for name, one in tree.items()}
        if isinstance(tree, list) and len(tree) == self.count and isinstance(tree[0], float):
            return tree[self.where]
        return type(tree)(map(self, tree)) if isinstance(tree, (tuple, list)) else tree


def _joined(results: Sequence[Any], sizes: Sequence[int]) -> Any:
    leaves, specs = zip(*map(tree_flatten, results), strict=True)

    def join(column: Sequence[Any]) -> Any:
        is_row = all(
            isinstance(one, Tensor) and one.dim() and len(one) == size
            for one, size in zip(column, sizes, strict=True)
        )
        return _cat(column) if is_row else column[0]

    return tree_unflatten([join(column) for column in zip(*leaves, strict=True)], specs[0])


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """Join parts in their memory layout, which decides what random numbers their elements get."""
    order = sorted(range(parts[0].dim()), key=parts[0].stride, reverse=True)
    joined = torch.cat([one.permute(order) for one in parts], order.index(0))
    return joined.permute(sorted(range(len(order)), key=order.__getitem__))


def draws(module: nn.Module) -> bool:
    """True if a module draws random numbers in its present mode."""
    return any(
        one.training
        and (
            isinstance(one, (_DropoutNd, nn.RReLU))
            or getattr(one, "draws", False)
            or (isinstance(getattr(one, "dropout", None), float) and one.dropout > 0)
        )
        for one in module.modules()
    )


def couples(module: nn.Module, is_step: bool) -> str:
    """The type of a module inside whose samples must stay together now; "" if there is none."""
    for one in module.modules():
        # The hooks of the module itself get the whole batch.
        when = getattr(one, "couples", "") or (
            one is not module and getattr(one, "hook_couples", "")
        )
        is_norm = isinstance(one, _NormBase) and (
            one.training if one.track_running_stats else _is_batch_norm(one)
        )
        is_now = {"always": True, "training": one.training, "backward": is_step}.get(when, False)
        if is_norm or is_now or (one.training and isinstance(one, _SpectralNorm)):
            return type(one).__name__
    return ""


def _is_batch_norm(one: nn.Module) -> bool:
    return isinstance(one, nn.modules.batchnorm._BatchNorm)


def _compared(report: Report, watch: _Watch, found: Network, run: Run) -> bool:
    """Compare one run; False if no other can follow."""
    loud = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ours = watch.run(found, run)
        except (*_REFUSALS, UcudnnError) as error:
            loud = first_line(error)
    warned = [str(one.message) for one in caught if issubclass(one.category, UcudnnWarning)]
    modules, mode = dict(found.model.named_modules()), run.mode
    _set_mode(found.model, mode)
    divided = watch.divided()
    loops = [name for name in divided if draws(modules[name])]
    coupled = [
        f"{name!r} is divided, and samples of {what} inside are coupled"
        for name in loops
        if (what := couples(modules[name], run.is_step))
    ]
    for name in loops:
        vars(modules[name]).update(forward=_Loop(modules[name], watch.calls[name]))
    try:
        right = _run(found.model, found, run)
    except _REFUSALS:
        # A part of coupled samples may not be computable.
        report.words.add("a run refused by torch")
        report.difference = coupled[0] if coupled and not loud else ""
        return False
    finally:
        for name in loops:
            del modules[name].forward
    if loud:
        report.words.add("error")
        report.loud.append(f"{loud} ({run})")
        return False
    difference = coupled[0] if coupled else _differing(ours, right)
    if warned:
        report.words.add("warning")
        report.loud.append(f"{warned[0]} ({run})")
    report.words |= {"compared", *_words(watch, run, divided, loops)}
    report.difference = f"{difference}, in {run}" if difference else ""
    return not difference


def _words(
    watch: _Watch, run: Run, divided: Collection[str], loops: Collection[str]
) -> Iterator[str]:
    """What segments did in a run."""
    if divided:
        yield "divided"
    if loops:
        yield "divided at random"
    for one in watch.segments:
        if run.is_step and one.module in watch.calls:
            if one.recompute:
                yield "recomputed"
                yield "recomputed in parts" if one.module in divided else "recomputed as a whole"
            if one.selective:
                yield "selective"


def trials(
    seeds: Sequence[int], without: Collection[str] = ()
) -> tuple[Counter[str], list[Report]]:
    """How many networks came to what, and the reports of those with a silent difference."""
    words: Counter[str] = Counter()
    silent = []
    for seed in seeds:
        report = trial(seed, without)
        words.update(report.words)
        silent += [report] if report.difference else []
    return words, silent


def needed(seed: int, drawn: Collection[str], without: Collection[str] = ()) -> list[str]:
    """The choices of a network without any of which there is no silent difference."""
    return [one for one in drawn if not trial(seed, {*without, one}).difference]


def main() -> int:
    """Run seeds as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=int, help="the seed, or the first of several")
    parser.add_argument("end", type=int, nargs="?", help="the seed after the last")
    parser.add_argument("--why", action="store_true", help="find the choices that faults need")
    parser.add_argument("--without", nargs="*", default=[], help="choices, such as block/hooked")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.end is None:
        report = trial(given.first, given.without)
        words, silent = Counter(report.words), [report]
    else:
        words, silent = trials(range(given.first, given.end), given.without)
    for report in silent:
        sys.stdout.write(f"{report}\n")
        if given.why and report.difference:
            choices = needed(report.seed, report.drawn, given.without)
            sys.stdout.write(f"    needs: {' '.join(choices)}\n")
    count = sum(bool(one.difference) for one in silent)
    sys.stdout.write(f"{count} silent differences; {dict(words.most_common())}\n")
    return count > 0


if __name__ == "__main__":
    sys.exit(main())
