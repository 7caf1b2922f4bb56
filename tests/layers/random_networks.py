"""Small random networks, in which modules do what modules of real networks do.

Each choice has a name, such as "block/skip" or "norm/batch". `network(7, without={"norm/batch"})`
is network 7 in which the first choice of its group stands wherever "norm/batch" was drawn; the
rest stays the same. So it can be found out which of its choices a fault needs.

A module may mark itself by an attribute `couples`, which says when its samples must stay together:
"always", in "training", or in "backward". `draws` is True if it draws random numbers in training,
and `draws_apart` if these are Python's or NumPy's.
"""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

# The shape of a sample.
SPACES = {
    "vector": (6,),
    "sequence": (3, 6),
    "line": (4, 7),
    "image": (4, 4, 5),
    "volume": (4, 3, 2, 3),
}
Build = Callable[["Maker"], nn.Module]


@dataclass
class Maker:
    """Draws modules that take and return a batch of samples of one shape."""

    chance: random.Random
    space: str
    without: Collection[str] = ()
    drawn: list[str] = field(default_factory=list)
    depth: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return SPACES[self.space]

    @property
    def is_image(self) -> bool:
        return self.space in {"line", "image", "volume"}

    @property
    def channels(self) -> int:
        return self.shape[0 if self.is_image else -1]

    def of_rank(self, name: str) -> Any:
        """The module of this name for the number of axes, such as nn.Conv2d."""
        return getattr(nn, f"{name}{len(self.shape) - 1 or 1}d")

    def pick(
        self, group: str, options: dict[str, Any], weights: dict[str, int] | None = None
    ) -> Any:
        """One of the options, or the first if the one that is drawn is left out."""
        weighed = [(weights or {}).get(name, 1) for name in options]
        (name,) = self.chance.choices([*options], weighed)
        if group in self.without or f"{group}/{name}" in self.without:
            name = next(iter(options))
        self.drawn.append(f"{group}/{name}")
        return options[name]

    def word(self, group: str, words: str, **weights: int) -> str:
        """One of several words, as `pick`."""
        found: str = self.pick(group, {one: one for one in words.split()}, weights)
        return found

    def make(self, group: str, options: dict[str, Build], **weights: int) -> nn.Module:
        """A module by one of the options, which has random numbers of its own."""
        seed = self.chance.getrandbits(32)
        torch.manual_seed(seed)
        build = self.pick(group, options, weights)
        inner = Maker(random.Random(seed), self.space, self.without, self.drawn, self.depth + 1)
        made: nn.Module = build(inner)
        return made

    def is_drawn(self, name: str, probability: float = 0.5) -> bool:
        """True with this probability, unless the name is left out."""
        drawn = self.chance.random() < probability and name not in self.without
        self.drawn.extend([name] if drawn else [])
        return drawn

    def block(self) -> nn.Module:
        """Any block, but deep inside others a plain one."""
        plain = 6 if self.depth < 2 else 1000
        return self.make("block", BLOCKS, plain=plain, skip=3, coupled=2, attention=2, recurrent=2)

    def inner(self) -> nn.Module:
        """A block inside another: a plain one, or any."""
        return self.make("inner", {"plain": plain, "random": chancy, "any": Maker.block}, plain=4)


# Layers.


def mix(make: Maker) -> nn.Module:
    """A layer with weights."""
    bias, a = make.chance.random() < 0.7, make.channels
    if not make.is_image:
        layer = nn.Linear(a, a, bias=bias)
    else:
        groups, name = make.chance.choice([(1, "Conv"), (2, "Conv"), (1, "ConvTranspose")])
        layer = make.of_rank(name)(a, a, 3, padding=1, groups=groups, bias=bias)
    wrap = {
        "none": lambda one: one,
        "weight": parametrizations.weight_norm,
        "spectral": parametrizations.spectral_norm,
    }
    return make.pick("weights", wrap, {"none": 12})(layer)


def act(make: Maker) -> nn.Module:
    options = {
        "gelu": nn.GELU,
        "tanh": nn.Tanh,
        "sigmoid": nn.Sigmoid,
        "softplus": nn.Softplus,
        "prelu": nn.PReLU,
        "relu": nn.ReLU,
        "leaky": partial(nn.LeakyReLU, 0.1),
        "elu": nn.ELU,
        "silu": nn.SiLU,
        "mish": nn.Mish,
        "hardtanh": nn.Hardtanh,
    }
    made = make.pick("act", options, {"relu": 3, "leaky": 3})()
    if hasattr(made, "inplace") and make.is_drawn("inplace", 0.4):
        made.inplace = True
    return made


class FrozenNorm(nn.Module):
    """A BatchNorm that always uses its running statistics."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def norm(make: Maker) -> nn.Module:
    a, chance = make.channels, make.chance
    affine = chance.random() < 0.7
    batch = None if make.space == "sequence" else make.of_rank("BatchNorm")
    options: dict[str, Any] = {"none": nn.Identity}
    if make.is_image:
        shape, instance = make.shape, make.of_rank("InstanceNorm")
        options |= {
            "instance": lambda: instance(a, affine=affine),
            "instance_tracked": lambda: instance(a, affine=affine, track_running_stats=True),
            "response": lambda: nn.LocalResponseNorm(3, alpha=0.1),
        }
    else:
        shape = (a,)
    options |= {"layer": lambda: nn.LayerNorm(shape, elementwise_affine=affine)}
    options |= {"rms": lambda: nn.RMSNorm(shape)}
    if batch:
        options |= {
            "group": lambda: nn.GroupNorm(2, a, affine=affine),
            "batch": lambda: batch(a, affine=affine),
            "batch_average": lambda: batch(a, momentum=None),
            "batch_untracked": lambda: batch(a, track_running_stats=False),
            "batch_frozen": lambda: FrozenNorm(batch(a, affine=affine)),
        }
    weights = {"none": 5, "group": 2, "instance": 2, "layer": 2, "batch_frozen": 2}
    return make.pick("norm", options, weights)()


class LayerDrop(nn.Module):
    """Leaves out what is inside, for all samples; by Python's random numbers."""

    draws = draws_apart = True

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() < 0.5 else x + self.inner(x)


class Noise(nn.Module):
    """Multiplies by noise: torch's or NumPy's."""

    draws = True

    def __init__(self, is_torchs: bool, is_one: bool) -> None:
        super().__init__()
        self.is_torchs, self.is_one = is_torchs, is_one
        self.draws_apart = not is_torchs

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        shape = () if self.is_one else x.shape
        if self.is_torchs:
            return x * (1 + 0.3 * torch.randn(shape, dtype=x.dtype))
        return x * torch.from_numpy(np.asarray(np.random.uniform(0.5, 1.5, shape)))


def noise(make: Maker) -> nn.Module:
    """A layer that draws random numbers."""
    options: dict[str, Build] = {
        "dropout": lambda _: nn.Dropout(0.3),
        "dropout_inplace": lambda _: nn.Dropout(0.3, inplace=True),
        "feature": lambda make: make.of_rank("Dropout")(0.3) if make.is_image else nn.Dropout(0.3),
        "alpha": lambda _: nn.AlphaDropout(0.3),
        "rrelu": lambda make: nn.RReLU(inplace=make.is_drawn("inplace", 0.3)),
        "layer_drop": lambda make: LayerDrop(plain(make)),
        "torch": lambda make: Noise(True, make.chance.random() < 0.5),
        "numpy": lambda make: Noise(False, make.chance.random() < 0.5),
    }
    return make.make("noise", options, dropout=2, layer_drop=2, numpy=2)


# Blocks.


def plain(make: Maker) -> nn.Module:
    """Layers one after another."""
    layers = []
    for _ in range(make.chance.choice([1, 1, 2])):
        order = make.chance.choice([(mix, norm, act), (norm, act, mix), (mix, act), (act, mix)])
        layers += [build(make) for build in order]
    return nn.Sequential(*layers)


def chancy(make: Maker) -> nn.Module:
    """Layers that draw random numbers."""
    return nn.Sequential(mix(make), noise(make), act(make), mix(make))


class Skip(nn.Module):
    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "onto":
            x += self.inner(x)
            return x
        if self.how == "onto_result":
            y = self.inner(x)
            y += x
            return y
        return x + self.inner(x)


def skip(make: Maker) -> nn.Module:
    how = make.word("skip", "plus onto onto_result", plus=2)
    return Skip(make.inner(), how)


class Branches(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module, last: nn.Module, how: str) -> None:
        super().__init__()
        self.first, self.second, self.last, self.how = first, second, last, how

    def forward(self, x: Tensor) -> Tensor:
        x = functional.leaky_relu(x, 0.1)
        a, b = self.first(x), self.second(x)
        if self.how == "gate":
            return self.last(a * b.sigmoid())
        if self.how == "join":
            return self.last(torch.cat([a, b]).view(2, *x.shape).prod(0))
        return self.last(a + b)


def branches(make: Maker) -> nn.Module:
    how = make.word("branches", "sum gate join")
    first, second, last = make.inner(), make.inner(), plain(make)
    return Branches(first, second, last, how)


class Twice(nn.Module):
    """Calls one module twice."""

    def __init__(self, inner: nn.Module, is_apart: bool) -> None:
        super().__init__()
        self.inner, self.is_apart = inner, is_apart

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner(x.tanh()) if self.is_apart else self.inner(self.inner(x))


def twice(make: Maker) -> nn.Module:
    is_apart = make.chance.random() < 0.5
    return Twice(make.inner(), is_apart)


@dataclass
class Found:
    """What some models return."""

    sample: Any
    rest: Any = None


Pair = namedtuple("Pair", "sample rest")


class Returning(nn.Module):
    """Returns its result inside something else."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        wraps: dict[str, Callable[[], Any]] = {
            "tuple": lambda: (y, x * 2),
            "dict": lambda: {"sample": y, "rest": {"x": x.sin(), "none": None}},
            "list": lambda: [y, None, x],
            "pair": lambda: Pair(y, x.cos()),
            "dataclass": lambda: Found(y, x.cos()),
            "none": lambda: (y, None),
            "number": lambda: (y, 3, "words", x.dtype),
            "mean": lambda: (y, y.mean()),
            "size": lambda: (y, x.shape),
            "views": lambda: (y, x[..., :2], x.transpose(-1, 1)),
            "same": lambda: (y, y),
        }
        return wraps[self.how]()


class Unpacking(nn.Module):
    """Adds up the tensors in a module's result."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result = self.inner(x)
        if isinstance(result, Found):
            result = [result.sample, result.rest]
        if isinstance(result, dict):
            result = [result["sample"], result["rest"]["x"]]
        y = result[0]
        others = [one for one in result[1:] if isinstance(one, Tensor)]
        for one in others:
            y = y + (one if one.shape == y.shape else one.mean())
        return y


def returning(make: Maker) -> nn.Module:
    words = "tuple dict list pair dataclass none number mean size views same"
    how = make.word("returns", words)
    return Unpacking(Returning(make.inner(), how))


class Given(nn.Module):
    """Takes more than its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any, other: Any = None, *, weight: Any = None, scale: Any = 1.0) -> Tensor:
        if isinstance(x, dict):
            x, other = x["x"], x["more"][0]
        if isinstance(x, (tuple, list)):
            x, other = x
        y = self.inner(x) * scale
        y = y if other is None else y + other.sin()
        return y if weight is None else y * weight


class Giving(nn.Module):
    """Calls a module with more than its input."""

    def __init__(self, inner: nn.Module, how: str, width: int) -> None:
        super().__init__()
        self.inner, self.how = inner, how
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1).mean(1).view(-1, *[1] * (x.dim() - 1))
        calls: dict[str, Callable[[], Tensor]] = {
            "named": lambda: self.inner(x=x, other=x.cos()),
            "tuple": lambda: self.inner((x, x.cos())),
            "list": lambda: self.inner([x, x.cos()]),
            "dict": lambda: self.inner({"x": x, "more": [x.cos(), None]}),
            "shared": lambda: self.inner(x, weight=self.weight),
            "rows": lambda: self.inner(x, scale=rows),
            "number": lambda: self.inner(x, None, scale=0.7),
            "scalar": lambda: self.inner(x, weight=self.weight.mean()),
            "same": lambda: self.inner(x, x),
        }
        return calls[self.how]()


def giving(make: Maker) -> nn.Module:
    words = "named tuple list dict shared rows number scalar same"
    how = make.word("arguments", words)
    return Giving(Given(make.inner()), how, make.shape[-1])


class PerSample(nn.Module):
    """Takes a list with a number for each sample."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, lengths: Any) -> Tensor:
        rows = torch.tensor([*lengths][: len(x)], dtype=x.dtype)
        return self.inner(x) * rows.view(-1, *[1] * (x.dim() - 1))


class Lengths(nn.Module):
    """Calls a module with a list that has an entry for each sample."""

    def __init__(self, inner: nn.Module, is_named: bool, is_tensor: bool) -> None:
        super().__init__()
        self.inner, self.is_named, self.is_tensor = PerSample(inner), is_named, is_tensor

    def forward(self, x: Tensor) -> Tensor:
        lengths: Any = [0.5 + 0.3 * n for n in range(len(x))]
        lengths = torch.tensor(lengths) if self.is_tensor else lengths
        return self.inner(x, lengths=lengths) if self.is_named else self.inner(x, lengths)


def lengths(make: Maker) -> nn.Module:
    is_named, is_tensor = (make.chance.random() < part for part in (0.5, 0.2))
    return Lengths(make.inner(), is_named, is_tensor)


class Adding(nn.Module):
    """Adds an auxiliary loss to the list or dict that it is called with."""

    couples = "always"

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, losses: Any) -> Tensor:
        y = self.inner(x)
        loss = y.square().mean()
        if isinstance(losses, dict):
            losses["loss"] = loss
        else:
            losses.append(loss)
        return y


class Collecting(nn.Module):
    def __init__(self, inner: nn.Module, is_dict: bool) -> None:
        super().__init__()
        self.inner, self.is_dict = Adding(inner), is_dict

    def forward(self, x: Tensor) -> Tensor:
        losses: Any = {} if self.is_dict else []
        y = self.inner(x, losses)
        return y + sum(losses.values() if self.is_dict else losses)


def collecting(make: Maker) -> nn.Module:
    is_dict = make.chance.random() < 0.5
    return Collecting(make.inner(), is_dict)


class Hooked(nn.Module):
    """Has a hook on a module inside."""

    def __init__(self, inner: nn.Module, how: str, place: float) -> None:
        super().__init__()
        self.inner, self.how = inner, how
        self.penalties: list[Any] = []
        inside = [*inner.modules()]
        target = inside[int(place * len(inside))]
        register, couples = {
            "collect": (target.register_forward_hook, "always"),
            "change": (target.register_forward_hook, ""),
            "change_before": (target.register_forward_pre_hook, ""),
            "centre": (target.register_forward_hook, "always"),
            "tensor_clamp": (target.register_forward_hook, ""),
            "tensor_norm": (target.register_forward_hook, "backward"),
            "tensor_collect": (target.register_forward_hook, "backward"),
            "backward_collect": (target.register_full_backward_hook, "backward"),
            "backward_change": (target.register_full_backward_hook, ""),
            "backward_norm": (target.register_full_backward_hook, "backward"),
            "backward_before": (target.register_full_backward_pre_hook, "backward"),
        }[how]
        register(getattr(self, f"_{how}"))
        if couples:
            target.hook_couples = couples

    def forward(self, x: Tensor) -> Tensor:
        self.penalties.clear()
        y = self.inner(x)
        if self.how == "collect":
            y = y + 0.3 * sum(self.penalties)
        return y

    def _collect(self, _: nn.Module, __: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            self.penalties.append(result.square().mean())

    def _change(self, _: nn.Module, __: Any, result: Any) -> Any:
        return result * 1.5 if isinstance(result, Tensor) else None

    def _change_before(self, _: nn.Module, args: Any) -> Any:
        return (args[0] * 0.5, *args[1:]) if args and isinstance(args[0], Tensor) else None

    def _centre(self, _: nn.Module, __: Any, result: Any) -> Any:
        return result - result.mean(0) if isinstance(result, Tensor) else None

    def _on_gradient(self, result: Any, hook: Callable[[Tensor], Any]) -> None:
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(hook)

    def _tensor_clamp(self, _: nn.Module, __: Any, result: Any) -> None:
        self._on_gradient(result, lambda g: g.clamp(-1, 1))

    def _tensor_norm(self, _: nn.Module, __: Any, result: Any) -> None:
        self._on_gradient(result, _normalised)

    def _tensor_collect(self, _: nn.Module, __: Any, result: Any) -> None:
        self._on_gradient(result, lambda g: self.penalties.append(g.norm()))

    def _backward_collect(self, _: nn.Module, __: Any, after: Any) -> None:
        self.penalties.append(after[0].norm())

    def _backward_change(self, _: nn.Module, before: Any, __: Any) -> Any:
        return tuple(one if one is None else 1.5 * one for one in before)

    def _backward_norm(self, _: nn.Module, before: Any, __: Any) -> Any:
        return tuple(one if one is None else _normalised(one) for one in before)

    def _backward_before(self, _: nn.Module, after: Any) -> Any:
        return tuple(one if one is None else _normalised(one) for one in after)


def _normalised(gradient: Tensor) -> Tensor:
    # Without the summand a gradient of rounding errors would become a large one.
    return gradient / (gradient.norm() + 0.1)


def hooked(make: Maker) -> nn.Module:
    words = (
        "change change_before collect centre tensor_clamp tensor_norm tensor_collect "
        "backward_collect backward_change backward_norm backward_before"
    )
    how, place = make.word("hook", words), make.chance.random()
    return Hooked(make.inner(), how, place)


class Leaving(nn.Module):
    """Leaves something of the batch in an attribute."""

    couples = "always"

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how
        self.loss: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.how == "loss":
            self.loss = y.square().mean()
        elif self.how == "losses":
            self.loss = {"mean": y.square().mean(), "more": [y.abs().mean()]}
        else:
            self.loss = y.sin()
        return y


class Fetching(nn.Module):
    """Adds what a module inside has left to its result."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y, loss = self.inner(x), self.inner.loss
        return y + (loss["mean"] + loss["more"][0] if isinstance(loss, dict) else loss)


def leaving(make: Maker) -> nn.Module:
    how = make.word("leaves", "feature loss losses")
    return Fetching(Leaving(make.inner(), how))


class Styled(nn.Module):
    """Reads a tensor that its parent sets."""

    couples = "always"

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.style: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.style) * self.style


class Styling(nn.Module):
    """Sets an attribute of a child before it calls it, and may change it after that."""

    def __init__(self, inner: nn.Module, how: str, is_changed: bool, width: int) -> None:
        super().__init__()
        self.inner, self.how, self.is_changed = Styled(inner), how, is_changed
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        if how in {"shared", "number"}:
            self.inner.couples = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "shared":
            self.inner.style = self.weight * 2
        elif self.how == "number":
            self.inner.style = 1.0 + x.detach().mean().abs().item()
        elif self.how == "mean":
            self.inner.style = x.mean() + 1
        else:
            self.inner.style = x.flatten(1).mean(1).view(-1, *[1] * (x.dim() - 1)) + 1
        y = self.inner(x)
        if self.is_changed:
            self.inner.style = self.inner.style * 0.5
        return y


def styling(make: Maker) -> nn.Module:
    how = make.word("style", "shared number mean rows")
    is_changed = make.is_drawn("style_changed", 0.3)
    return Styling(make.inner(), how, is_changed, make.shape[-1])


class Counted(nn.Module):
    """Counts its calls, in an attribute or a buffer, or keeps an average."""

    couples = "always"

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.count = inner, how, 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.how == "buffer":
            self.calls += 1
        elif self.how == "buffer_anew":
            self.calls = self.calls + 1
        elif self.how == "average":
            y = y + self.calls
            if self.training:
                self.calls.mul_(0.9).add_(0.1 * y.detach().mean())
        else:
            self.count += 1
        return y / (1 + 1 / self.count) if self.how == "used" else y


def counted(make: Maker) -> nn.Module:
    how = make.word("count", "attribute used buffer buffer_anew average")
    return Counted(make.inner(), how)


class Checkpointed(nn.Module):
    """Recomputes what is inside by itself."""

    def __init__(self, inner: nn.Module, is_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.is_reentrant = inner, is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        # torch's own checkpoints change buffers again, draw other numbers than torch's generator
        # drew, and give wrong gradients of RReLU: such a network would be no truth.
        is_odd = any(True for _ in self.inner.buffers()) or any(
            isinstance(one, nn.RReLU) or getattr(one, "draws_apart", False)
            for one in self.inner.modules()
        )
        if is_odd or not (self.training and torch.is_grad_enabled() and x.requires_grad):
            return self._run(x)
        return checkpoint(self._run, x, use_reentrant=self.is_reentrant)

    def _run(self, x: Tensor) -> Tensor:
        y = functional.layer_norm(x, x.shape[1:])
        return self.inner(y) + y.sin() + self.inner(functional.leaky_relu(y, 0.1))


def checkpointed(make: Maker) -> nn.Module:
    is_reentrant = make.is_drawn("reentrant", 0.2)
    return Checkpointed(make.make("checkpointed", {"plain": plain, "random": chancy}), is_reentrant)


class Tokens(nn.Module):
    """Sees samples as sequences of tokens, for attention and recurrent layers."""

    def __init__(self, inner: nn.Module, is_first: bool, is_image: bool) -> None:
        super().__init__()
        self.inner, self.is_first, self.is_image = inner, is_first, is_image

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2) if self.is_image else x
        tokens = tokens.unsqueeze(1) if tokens.dim() == 2 else tokens
        tokens = tokens if self.is_first else tokens.transpose(0, 1)
        if isinstance(self.inner, nn.MultiheadAttention):
            y, weights = self.inner(tokens, tokens, tokens)
            y = y if weights is None else y * weights.square().mean().detach()
        else:
            y = self.inner(tokens)
            y = y[0] if isinstance(y, tuple) else y
        y = y if self.is_first else y.transpose(0, 1)
        return (y.transpose(1, 2) if self.is_image else y).reshape(x.shape)


class FirstOnly(nn.Module):
    """Attention or a recurrent layer of which only the first result is returned."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, nn.MultiheadAttention):
            return self.inner(x, x, x, need_weights=False)[0]
        return self.inner(x)[0]


def attention(make: Maker) -> nn.Module:
    chance, a = make.chance, make.channels
    is_first, drop = chance.random() < 0.7, chance.choice([0.0, 0.0, 0.2])

    def one() -> nn.Module:
        return nn.MultiheadAttention(a, 2, batch_first=is_first, dropout=drop)

    def encoder() -> nn.Module:
        is_before = chance.random() < 0.5
        return nn.TransformerEncoderLayer(a, 2, 8, drop, batch_first=is_first, norm_first=is_before)

    options = {"alone": one, "first": lambda: FirstOnly(one()), "encoder": encoder}
    return Tokens(make.pick("attention", options)(), is_first, make.is_image)


def recurrent(make: Maker) -> nn.Module:
    chance, a = make.chance, make.channels
    is_first, layers = chance.random() < 0.7, chance.choice([1, 1, 2])
    build = make.pick("recurrent", {"gru": nn.GRU, "lstm": nn.LSTM})
    drop = 0.2 if layers > 1 and chance.random() < 0.5 else 0.0
    layer = build(a, a, layers, batch_first=is_first, dropout=drop)
    return Tokens(FirstOnly(layer) if chance.random() < 0.6 else layer, is_first, make.is_image)


class Scaled(torch.autograd.Function):
    """Keeps its result for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.clamp(max=3).exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class Rounded(torch.autograd.Function):
    """Passes gradients through, or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return (4 * x).round() / 4 + 0.1 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class Centred(torch.autograd.Function):
    """Its samples depend on each other in backward."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class Applying(nn.Module):
    """Applies a function to what a module returns."""

    def __init__(self, inner: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


def own_function(make: Maker) -> nn.Module:
    options = {"scaled": Scaled.apply, "rounded": _rounded, "reversed": _reversed}
    return Applying(make.inner(), make.pick("function", options))


def _rounded(x: Tensor) -> Tensor:
    return Rounded.apply(x, 1.0)


def _reversed(x: Tensor) -> Tensor:
    return Rounded.apply(x, -0.5)


def _contrasted(x: Tensor) -> Tensor:
    rows = functional.normalize(x.flatten(1), dim=1)
    return ((rows @ rows.T).softmax(1) @ rows).view(x.shape) + x


def _backward_only(x: Tensor) -> Tensor:
    mean = x.mean(0)
    return x + (mean - mean.detach())


def _normalising(x: Tensor) -> Tensor:
    if x.requires_grad:
        x = x.view_as(x)
        x.register_hook(_normalised)
    return x


class Mixup(nn.Module):
    """Mixes samples in every second step."""

    couples, draws = "training", True

    def __init__(self, inner: nn.Module, is_torchs: bool) -> None:
        super().__init__()
        self.inner, self.is_torchs = inner, is_torchs
        self.draws_apart = not is_torchs

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if not self.training:
            return y
        if self.is_torchs:
            return 0.7 * y + 0.3 * y[torch.randperm(len(y))] if torch.rand(()) < 0.5 else y
        order = np.random.permutation(len(y))
        return 0.7 * y + 0.3 * y[torch.from_numpy(order)] if random.random() < 0.5 else y


def coupled(make: Maker) -> nn.Module:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "centred": lambda x: x - x.mean(0),
        "norm": lambda x: x / (1 + x.norm()),
        "flipped": lambda x: x + x.flip(0),
        "summed": lambda x: x.cumsum(0),
        "largest": lambda x: x + 0.5 * x.abs().amax(),
        "first": lambda x: x * x[:1].sigmoid(),
        "contrasted": _contrasted,
    }
    backward: dict[str, Callable[[Tensor], Tensor]] = {
        "backward_mean": _backward_only,
        "backward_norm": _normalising,
        "backward_function": Centred.apply,
    }
    options: dict[str, Build] = {
        name: partial(_applying, function=one, couples="always") for name, one in functions.items()
    }
    for name, one in backward.items():
        options[name] = partial(_applying, function=one, couples="backward")
    options["mixup"] = lambda make: Mixup(make.inner(), True)
    options["mixup_apart"] = lambda make: Mixup(make.inner(), False)
    return make.make("coupled", options, mixup=2, mixup_apart=2)


def _applying(make: Maker, function: Callable[[Tensor], Tensor], couples: str) -> nn.Module:
    made = Applying(make.inner(), function)
    made.couples = couples
    return made


BLOCKS: dict[str, Build] = {
    "plain": plain,
    "chancy": chancy,
    "skip": skip,
    "branches": branches,
    "twice": twice,
    "returning": returning,
    "giving": giving,
    "lengths": lengths,
    "collecting": collecting,
    "hooked": hooked,
    "leaving": leaving,
    "styling": styling,
    "counted": counted,
    "checkpointed": checkpointed,
    "attention": attention,
    "recurrent": recurrent,
    "own_function": own_function,
    "coupled": coupled,
}


class Net(nn.Module):
    """A random network: a first layer, blocks, and a result in one of several forms."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], how: str) -> None:
        super().__init__()
        self.stem, self.blocks, self.how = stem, nn.Sequential(*blocks), how

    def forward(self, x: Tensor) -> Any:
        y = self.blocks(self.stem(x))
        if self.how == "tuple":
            return y, None, x.sin()
        return {"sample": y, "mean": y.mean()} if self.how == "dict" else y


@dataclass(frozen=True)
class Network:
    """A random network, and what its inputs are like.

    Attributes:
        shape: of a sample.
        layout: a memory format of the model and its inputs.
        drawn: the names of all choices.
    """

    model: nn.Module
    shape: tuple[int, ...]
    layout: torch.memory_format
    drawn: tuple[str, ...]

    def inputs(self, count: int, needs: bool) -> Tensor:
        """As many samples, each of another size."""
        x = torch.randn(count, *self.shape, dtype=torch.float64)
        x *= torch.linspace(0.5, 2, count, dtype=x.dtype).view(-1, *[1] * len(self.shape))
        return x.contiguous(memory_format=self.layout).requires_grad_(needs)


def network(seed: int, without: Collection[str] = ()) -> Network:
    """The random network of a seed, without choices of these names."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    space = chance.choices([*SPACES], [3, 2, 1, 5, 1])[0]
    make = Maker(chance, space, frozenset(without))
    stem = mix(make)
    blocks = [make.block() for _ in range(chance.choice([1, 2, 2, 3]))]
    how = make.word("result", "plain tuple dict", plain=4)
    model = Net(stem, blocks, how).double()
    if make.is_drawn("frozen_weights", 0.15):
        for one in model.parameters():
            one.requires_grad_(chance.random() < 0.6)
    layout = torch.contiguous_format
    if space in {"image", "volume"} and make.is_drawn("channels_last", 0.4):
        layout = torch.channels_last if space == "image" else torch.channels_last_3d
        for one in model.parameters():
            if one.dim() == len(make.shape) + 1:
                one.data = one.data.contiguous(memory_format=layout)
    return Network(model, make.shape, layout, tuple(dict.fromkeys(make.drawn)))
