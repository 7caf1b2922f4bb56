"""Odd models before and after `tune`, `advise` and `trace`: nothing changes, bit for bit."""

from __future__ import annotations

import collections
import contextvars
import copy
import functools
import itertools
import random
import threading
import types
import weakref
from queue import Queue

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import ucudnn
from ucudnn.errors import ConfigError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ucudnn.errors.UcudnnWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]
SHAPE = (2, 3, 8, 8)
QUICK = {"policy": "undivided", "effort": "quick", "time_budget_s": 1.0}


def contents(one, seen):
    """All that an object leads to, with identities: values, bits of tensors, generators' states."""
    if isinstance(one, (type(None), bool, int, float, complex, str, bytes, torch.dtype, type)):
        return one
    if id(one) in seen:
        return "seen", id(one)
    seen[id(one)] = one
    return id(one), type(one).__name__, *parts(one, seen)


def contents_of(*many):
    seen = {}
    return [contents(one, seen) for one in many]


def parts(one, seen):
    again = functools.partial(contents, seen=seen)
    kind = next((kind for kind in PARTS if isinstance(one, kind)), None)
    if kind is not None:
        return PARTS[kind](one, again)
    slots = [name for cls in type(one).__mro__ for name in getattr(cls, "__slots__", ())]
    state = {name: getattr(one, name) for name in slots if hasattr(one, name) and name[:2] != "__"}
    return again(getattr(one, "__dict__", None)), [(name, again(state[name])) for name in state]


def value_of(cell):
    try:
        return cell.cell_contents
    except ValueError:
        return "unassigned"


def bits(tensor):
    plain = tensor.detach()
    if plain.is_quantized:
        plain = plain.int_repr()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    raw = plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    place = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    return raw, tensor.shape, tensor._version, tensor.requires_grad, place


def bits_and_gradient(tensor, again):
    return *bits(tensor), again(tensor.grad) if tensor.is_leaf else None, again(vars(tensor))


# The first that fits counts. What torch keeps out of Python is empty.
PARTS = {
    (nn.UninitializedParameter, nn.parameter.UninitializedBuffer): lambda _, __: (),
    (types.ModuleType, torch.ScriptObject, torch.jit.ScriptModule): lambda _, __: (),
    torch.Tensor: bits_and_gradient,
    torch.Generator: lambda one, _: one.get_state().tolist(),
    np.ndarray: lambda one, _: (one.tobytes(), one.strides),
    np.random.Generator: lambda one, _: (repr(one.bit_generator.state),),
    np.random.RandomState: lambda one, _: (repr(one.get_state()),),
    random.Random: lambda one, _: (one.getstate(),),
    types.GeneratorType: lambda one, _: (repr(one.gi_frame.f_locals),),
    # Calling it makes a new method.
    weakref.WeakMethod: lambda one, again: (again(one().__self__),),
    weakref.ref: lambda one, again: (again(one()),),
    type(iter([])): lambda one, _: one.__reduce__()[2:],
    dict: lambda one, again: [(again(key), again(value)) for key, value in one.items()],
    (list, tuple, collections.deque): lambda one, again: [again(value) for value in one],
    (set, frozenset): lambda one, _: sorted(map(id, one)),
    types.FunctionType: lambda one, again: (
        again(vars(one)),
        [again(value_of(cell)) for cell in one.__closure__ or ()],
    ),
    types.MethodType: lambda one, again: (again(one.__self__), again(one.__func__)),
    functools.partial: lambda one, again: (again(one.func), again(one.args), again(one.keywords)),
}


class Model(nn.Module):
    """A convolution, and state that `forward` writes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.make()

    def make(self):
        pass

    def forward(self, x):
        return self.use(self.conv(x))

    def use(self, y):
        return y


class Written(Model):
    """Writes to inputs, weights, buffers, a plain tensor; an embedding is renormalised."""

    def make(self):
        self.embedding = nn.Embedding(4, 4, max_norm=0.1)
        # MoCo's queue of keys, with its pointer.
        self.register_buffer("queue", torch.randn(4, 6))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("minimum", torch.full((1, 1, 1), 9.0).expand(4, 1, 1))
        self.mean = torch.zeros(4)

    def forward(self, x):
        x.detach().mul_(0.5)
        with torch.no_grad():
            self.conv.weight.clamp_(-0.01, 0.01)
        y = self.conv(x)
        self.minimum = torch.minimum(self.minimum, y.detach().amin((0, 2, 3))[:, None, None])
        self.queue[:, :2] = y.detach().mean((2, 3)).T
        self.pointer.add_(2)
        if type(y) is torch.Tensor:
            self.mean.mul_(0.9).add_(y.detach().mean((0, 2, 3)))
        shift = self.embedding(torch.arange(4)).sum(0) - self.mean
        return y + shift[:, None, None]


class Momentum(Model):
    """Has two momentum encoders, one of them in a list, where torch does not see it."""

    def make(self):
        self.keys = copy.deepcopy(self.conv).requires_grad_(False)
        self.hidden = [copy.deepcopy(self.keys)]

    def forward(self, x):
        with torch.no_grad():
            for keys in (self.keys, *self.hidden):
                for slow, fast in zip(keys.parameters(), self.conv.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast + 1, alpha=0.1)
        return self.conv(x) * self.keys(x) * self.hidden[0](x)


class Normalised(Model):
    """Has a gradient, and a parameter without one; writes to its weights through NumPy."""

    def make(self):
        self.unused = nn.Parameter(torch.ones(2))
        self.conv.weight.grad = torch.ones_like(self.conv.weight)

    def forward(self, x):
        if type(x) is torch.Tensor:
            self.conv.weight.detach().numpy()[:] *= 0.5
        return self.conv(x)


class Lazy(Model):
    def make(self):
        self.scale = None

    def use(self, y):
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(y.shape[1:]))
            self.register_buffer("late", torch.ones(3))
        return y * self.scale


class LazyLayer(Model):
    def make(self):
        self.head = nn.LazyConv2d(2, 1)

    def use(self, y):
        return self.head(y)


class Random(Model):
    """Draws from generators of its own, and from those of torch, Python and NumPy."""

    def make(self):
        self.generator = torch.Generator().manual_seed(3)
        self.random, self.numpy = random.Random(3), np.random.default_rng(3)

    def use(self, y):
        y = y * torch.rand(4, 1, 1, generator=self.generator)
        y = y * self.random.random() * float(self.numpy.random())
        return functional.dropout(y) + torch.rand(()) * random.random() * float(np.random.rand())


class Slots:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 0


class Containers(Model):
    """Writes to containers and a slot, keeps a result of autograd; the layer finds its owner."""

    def make(self):
        self.log, self.pair, self.ring = [], ({}, []), collections.deque([1], 3)
        self.seen, self.nested = set(), collections.OrderedDict(a={"b": [1]})
        self.slots = Slots()
        self.state = (torch.ones(4, requires_grad=True) * 2,)
        self.calls, self.conv.owner = 0, weakref.ref(self)

    def use(self, y):
        self.log.append(y)
        self.pair[0]["y"] = self.pair[1]
        self.ring.append(y.shape)
        self.seen.add(len(self.seen))
        self.nested["a"]["b"] += [y]
        self.nested.move_to_end("a")
        self.slots.value = y
        self.conv.owner().calls += 1
        y = y + self.state[0].detach()[:, None, None]
        self.state = (y.mean((0, 2, 3)),)
        return y


class Closures(Model):
    """Hooks that collect into variables of the function that made them."""

    def make(self):
        seen, latest, calls = [], None, 0

        def keep(module, inputs, output):
            nonlocal latest, calls
            latest, calls = output, calls + 1
            seen.append(output)

        self.conv.register_forward_hook(keep)
        self.conv.register_forward_hook(functools.partial(self.note, seen))
        self.conv.register_full_backward_hook(lambda *call: seen.append(call[1]))
        self.conv.weight.register_hook(lambda gradient: gradient * 2)
        self.shown = keep

    @staticmethod
    def note(seen, *call):
        seen.append(call)


class Replaced(Model):
    """Its forward is another function's, with a variable."""

    def make(self):
        calls = [0]

        def forward(this, x):
            calls[0] += 1
            return this.conv(x) * calls[0]

        self.forward = types.MethodType(forward, self)


class Tied(Model):
    """Two layers have one weight and a third one its data, a view of one flat tensor."""

    def make(self):
        weight, bias = self.conv.weight, self.conv.bias
        self.flat = torch.cat([weight.data.view(-1), bias.data])
        weight.data = self.flat[: weight.numel()].view_as(weight)
        bias.data = self.flat[weight.numel() :]
        self.second, self.third = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.second.weight, self.third.weight.data = weight, weight.data

    def forward(self, x):
        return self.conv(x) + self.second(x) + self.third(x)


class Spectral(Model):
    """Its power iteration writes to buffers in each forward; the second has torch's old norm."""

    def make(self):
        parametrizations.spectral_norm(self.conv)
        self.second = nn.utils.weight_norm(nn.Conv2d(4, 4, 1))

    def use(self, y):
        return self.second(y)


class Tupled(Model):
    """Functions that lead to the model are in tuples, slots, partials and defaults."""

    def make(self):
        self.calls = 0

        def used(x):
            self.calls += 1
            return self.conv(x)

        self.pair = (used, {"used": (used,)})
        self.named = collections.namedtuple("Named", "used")(used)
        self.slots = Slots()
        self.slots.value = used
        self.partial = functools.partial(self.call, used)
        self.default = lambda x, used=(self,): used[0].conv(x)

    @staticmethod
    def call(function, x):
        return function(x)

    def forward(self, x):
        y = self.pair[0](x) + self.pair[1]["used"][0](x) + self.named.used(x)
        return y + self.slots.value(x) + self.partial(x) + self.default(x)


class Weak(Model):
    def make(self):
        self.calls, self.called = 0, weakref.WeakMethod(self.note)
        self.by_name = weakref.WeakValueDictionary(conv=self.conv)
        self.scales = weakref.WeakKeyDictionary({self.conv: 2})

    def note(self):
        self.calls += 1

    def forward(self, x):
        self.called()()
        conv = self.by_name["conv"]
        return conv(x) * self.scales[conv]


MISSING = object()
CONTEXT = contextvars.ContextVar("CONTEXT", default=2)


class Marked(Model):
    """Compares with an object that has no other use, and has a variable of a context."""

    def make(self):
        self.bound, self.factor = MISSING, CONTEXT

    def use(self, y):
        return y * self.factor.get() if self.bound is MISSING else y.clamp(max=self.bound)


class Norms(Model):
    def make(self):
        self.norm, self.momentless = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)

    def use(self, y):
        return self.momentless(self.norm(y))


class Quantised(Model):
    def make(self):
        self.register_buffer("table", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))

    def use(self, y):
        return y * self.table.dequantize()[:, None, None]


class Scripted(Model):
    def make(self):
        self.script = torch.jit.script(nn.BatchNorm2d(4))

    def use(self, y):
        return self.script(y)


class Generated(Model):
    """Draws from a generator, which cannot be copied."""

    def make(self):
        self.numbers = (float(number) for number in itertools.count())
        self.frame = self.numbers.gi_frame

    def use(self, y):
        return y * next(self.numbers)


class Locked(Model):
    """A trainer with a lock, queues and more that cannot be copied."""

    def make(self):
        self.member, self.lock, self.batches = Unpicklable(), threading.Lock(), Queue()
        self.batches.put(1)

    def use(self, y):
        with self.lock:
            return y


class Unpicklable:
    def __reduce_ex__(self, protocol):
        raise OSError("stays where it is")


class SharesItself(Model):
    """A part says that a copy of it is it."""

    def make(self):
        self.part = SharedPart()

    def use(self, y):
        return self.part(y)


class SharedPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def __deepcopy__(self, memo):
        return self

    def forward(self, y):
        self.calls += 1
        return y


class SelfOptimised(Model):
    """Takes a step of its optimiser in forward."""

    def make(self):
        self.optimizer = torch.optim.Adam(self.parameters())

    def forward(self, x):
        self.conv(x).sum().backward()
        self.optimizer.step()
        return self.conv(x)


KINDS = [
    kind
    for kind in globals().values()
    if isinstance(kind, type) and issubclass(kind, Model) and kind is not Model
]
# Of these no step is run: they cannot be copied. A trace cannot draw from a generator either.
KEPT = {Generated, Locked, SharesItself}
UNTRACED = {Generated, SharesItself}
# Advice runs the same steps of a copy; what it says where there are none.
ADVISED = dict.fromkeys((Written, Momentum, Closures, Norms), "")
ADVISED |= dict.fromkeys(KEPT - UNTRACED, "the model cannot be copied")
ADVISED |= {LazyLayer: "no plain tensors"}
# Their own code needs values, or runs where torch's fake tensors cannot.
REAL = {Norms, Scripted, Quantised}


def eval_mode(model):
    return model.eval()


def in_another(model):
    """Beside a second one, which shares its convolution."""
    return nn.Sequential(model, nn.Conv2d(4, 4, 1), nn.Dropout())


def frozen(model):
    return model.requires_grad_(False)


FORMS = {"": lambda model: model, "eval": eval_mode, "in another": in_another, "frozen": frozen}
CASES = [(kind, "") for kind in KINDS] + [
    pytest.param(kind, form, marks=pytest.mark.nightly)
    for form in ("eval", "in another", "frozen")
    for kind in (Written, Momentum, Random, Closures, Spectral, Norms, Lazy)
]


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


@pytest.mark.parametrize(("kind", "form"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_nothing_of_a_model_changes(kind, form):
    torch.manual_seed(0)
    model, x = FORMS[form](kind()), torch.randn(SHAPE)
    before, at_first = contents_of(model, x), random_states()
    config = ucudnn.Config(layout="auto", **QUICK)
    if kind in UNTRACED:
        for call in (ucudnn.trace, ucudnn.tune, ucudnn.advise):
            with pytest.raises(ConfigError, match="cannot be copied"):
                call(model, x)
        assert contents_of(model, x) == before
        return
    real = kind in REAL and (kind, form) != (Norms, "eval")
    if real:
        with pytest.raises(ConfigError, match="real=True"):
            ucudnn.trace(model, x)
    else:
        ucudnn.trace(model, x)
    assert contents_of(model, x) == before
    if kind in KEPT:
        with pytest.raises(ConfigError, match="no step can be traced: the model cannot be copied"):
            ucudnn.trace(model, x, real=True)
    else:
        ucudnn.trace(model, x, real=True)
    assert contents_of(model, x) == before
    plan = ucudnn.tune(model, x, config, real=real)
    assert contents_of(model, x) == before
    assert random_states() == at_first
    if kind in KEPT:
        assert "the model cannot be copied" in plan.layout_race.reason + plan.step_race.reason
    elif kind is not LazyLayer:
        assert "computed" not in plan.step_race.reason, plan.step_race
    if kind not in ADVISED:
        return
    advice = ucudnn.advise(model, x, real=real)
    assert contents_of(model, x) == before
    if ADVISED[kind]:
        assert ADVISED[kind] in advice.reason
    else:
        assert advice.step_ns, advice.reason


def test_steps_of_a_model_that_ranks_train_do_not_wait_for_them(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, x = nn.parallel.DistributedDataParallel(Random()), torch.randn(SHAPE)
        # The first step divides the gradients into buckets.
        model(x).sum().backward()
        before = contents_of(*model.parameters(), x)
        assert [one.op for one in ucudnn.trace(model, x)] == ["fprop", "wgrad"]
        assert ucudnn.advise(model, x).step_ns
        assert contents_of(*model.parameters(), x) == before
    finally:
        dist.destroy_process_group()


def test_a_model_that_is_nested_too_deeply_is_refused():
    model = Model()
    for _ in range(10**4):
        model.nested = [getattr(model, "nested", None)]
    with pytest.raises(ConfigError, match="nested too deeply"):
        ucudnn.trace(model, torch.randn(SHAPE), real=True)
