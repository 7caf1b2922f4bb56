"""Engine configurations of a problem: list them, name them exactly, build one by its name.

An identity such as "eng67_k2=20_k13=0" is an engine's global index and the values of all its knobs
(parameters), in cuDNN's numbers. It names the same implementation at any batch size; a position in
a heuristic's list would not. No knob is left out, because cuDNN would silently use the default of
that knob. "bias_eng41_k2=3" is an engine of the fused pattern (convolution + bias). cuDNN numbers
the engines of this pattern separately.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ucudnn.backends.cudnn.api import Cudnn, CudnnError, Descriptor
from ucudnn.backends.cudnn.constants import (
    KNOB_TYPES,
    Attribute,
    BehaviorNote,
    DescriptorKind,
    HeuristicMode,
    NumericalNote,
    Type,
)
from ucudnn.backends.cudnn.graph import BIAS_UID, W_UID, X_UID, Y_UID, Target, Views, graph_of
from ucudnn.errors import UnsupportedError
from ucudnn.problem import Problem

# For each op the numbers of the tensors in the order in which an executable gets them: first
# operand, second operand, result.
_OPERAND_UIDS = {
    "fprop": (X_UID, W_UID, Y_UID),
    "dgrad": (Y_UID, W_UID, X_UID),
    "wgrad": (X_UID, Y_UID, W_UID),
}
# A few knobs have the value -1, so the pattern allows a sign.
_IDENTITY = re.compile(r"(?P<bias>bias_)?eng(?P<engine>\d+)(?P<knobs>(?:_k\d+=-?\d+)*)")


@dataclass(frozen=True, slots=True)
class Configuration:
    """An engine with all its knobs, as proposed by a heuristic."""

    identity: str
    # Workspace for writing the result at the problem's batch. Adding to a gradient (beta 1) may
    # need more: the size of the gradient and 16 bytes.
    workspace_bytes: int
    mode: str  # the first heuristic that proposes it: "A", "B" or "FALLBACK"
    rank: int  # its position among all configurations of the problem, in the order of the modes
    notes: tuple[str, ...]  # cuDNN's numerical and behavior notes, such as "TENSOR_CORE"

    @property
    def is_runtime_compiled(self) -> bool:
        """True if building the engine compiles code, which takes 0.3 to 2 s instead of 0.1 ms."""
        return BehaviorNote.RUNTIME_COMPILATION.name in self.notes

    @property
    def is_deterministic(self) -> bool:
        """True if the engine computes the same bits each time."""
        return NumericalNote.NONDETERMINISTIC.name not in self.notes

    def is_allowed(self, problem: Problem, deterministic: bool = False) -> bool:
        """True if PyTorch's rules allow the engine for a problem.

        Engines that convert float32 to a narrower type are never allowed. Tensor cores multiply
        float32 as TF32, which `problem.math` may rule out. `deterministic` rules out
        nondeterministic engines.
        """
        # Whether an engine uses TF32 is read from its notes, because no attribute of a convolution
        # switches TF32 off.
        if deterministic and not self.is_deterministic:
            return False
        ruled_out: set[str] = set()
        if problem.dtype == "float32":
            ruled_out.add(NumericalNote.DOWN_CONVERT_INPUTS.name)
            if problem.math == "strict":
                ruled_out.add(NumericalNote.TENSOR_CORE.name)
        return not ruled_out & set(self.notes)


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """cuDNN's plan: a configuration that is ready to run, by one thread at a time."""

    descriptor: Descriptor
    identity: str
    workspace_bytes: int
    # Numbers of the tensors (x, w, y), (dy, w, dx) or (x, dy, dw), then that of the bias, if any.
    uids: tuple[int, ...]


def configurations(
    target: Target, problem: Problem, *, views: Views | None = None, bias: bool = False
) -> list[Configuration]:
    """All distinct configurations that the heuristics A, B and FALLBACK propose, best first.

    With `bias`, these are the configurations of the fused pattern that adds a bias (fprop only).
    """
    found: dict[str, Configuration] = {}
    notes: dict[int, tuple[str, ...]] = {}  # by engine index: knobs do not change the notes
    reader = _Reader(target.cudnn)
    said = f"cuDNN {target.cudnn.version_text} has no engine for {problem}"
    with _refusals(said):
        graph = graph_of(target, problem, views, bias=bias)
        # All three heuristics are asked, because the list of heuristic A may have only engines for
        # tensor cores, which are ruled out in strict float32.
        for mode in HeuristicMode:
            for config in _proposals(target, graph, mode):
                engine = reader.engine(config)
                index = engine.get_int64(Attribute.ENGINE_GLOBAL_INDEX)
                # The lists overlap. A configuration keeps the place in which it was first proposed.
                identity = _identity(index, reader.knobs(config), bias)
                if identity in found:
                    continue
                if index not in notes:
                    notes[index] = _notes(engine)
                found[identity] = Configuration(
                    identity,
                    config.get_int64(Attribute.ENGINECFG_WORKSPACE_SIZE),
                    mode.name,
                    len(found),
                    notes[index],
                )
    if not found:
        raise UnsupportedError(said)
    return list(found.values())


def _proposals(target: Target, graph: Descriptor, mode: HeuristicMode) -> list[Descriptor]:
    heuristic = Descriptor(target.cudnn, DescriptorKind.ENGINEHEUR)
    heuristic.set_descriptors(Attribute.ENGINEHEUR_OPERATION_GRAPH, graph)
    heuristic.set_enum(Attribute.ENGINEHEUR_MODE, Type.HEUR_MODE, mode)
    if target.device is not None:
        heuristic.set_descriptors(Attribute.ENGINEHEUR_DEVICEPROP, target.device)
    try:
        heuristic.finalize()
        return heuristic.get_descriptors(Attribute.ENGINEHEUR_RESULTS, DescriptorKind.ENGINECFG)
    except CudnnError as error:
        if error.is_refusal:  # this heuristic proposes nothing, but another one may
            return []
        raise


class _Reader:
    """Reads the engine and the knobs of configurations, with descriptors that are made once."""

    def __init__(self, cudnn: Cudnn) -> None:
        self._engine = [Descriptor(cudnn, DescriptorKind.ENGINE)]
        # These descriptors are reused, because a problem has dozens of configurations, each of
        # which would need 64 of them.
        self._knobs = [Descriptor(cudnn, DescriptorKind.KNOB_CHOICE) for _ in range(KNOB_TYPES)]

    def engine(self, config: Descriptor) -> Descriptor:
        """The engine of a configuration, which is valid until the next call."""
        (engine,) = config.read_into(self._engine, Attribute.ENGINECFG_ENGINE)
        return engine

    def knobs(self, config: Descriptor) -> Iterator[tuple[int, int]]:
        for knob in config.read_into(self._knobs, Attribute.ENGINECFG_KNOB_CHOICES):
            kind = knob.get_enum(Attribute.KNOB_CHOICE_KNOB_TYPE, Type.KNOB_TYPE)
            yield kind, knob.get_int64(Attribute.KNOB_CHOICE_KNOB_VALUE)


def _identity(engine: int, knobs: Iterable[tuple[int, int]], bias: bool) -> str:
    # The knobs are sorted, so that the name does not depend on the order in which cuDNN lists them.
    choices = "".join(f"_k{kind}={value}" for kind, value in sorted(knobs))
    return f"{'bias_' if bias else ''}eng{engine}{choices}"


def _notes(engine: Descriptor) -> tuple[str, ...]:
    numerical = engine.get_enums(Attribute.ENGINE_NUMERICAL_NOTE, Type.NUMERICAL_NOTE)
    behavior = engine.get_enums(Attribute.ENGINE_BEHAVIOR_NOTE, Type.BEHAVIOR_NOTE)
    return (
        *(_name(NumericalNote, "NUMERICAL_NOTE", note) for note in numerical),
        *(_name(BehaviorNote, "BEHAVIOR_NOTE", note) for note in behavior),
    )


def _name(notes: type[NumericalNote | BehaviorNote], kind: str, value: int) -> str:
    """Name of a note; a note that only newer releases of cuDNN have is named by its number."""
    return notes(value).name if value in list(notes) else f"{kind}_{value}"


def build_plan(
    target: Target,
    problem: Problem,
    identity: str,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    views: Views | None = None,
) -> ExecutionPlan:
    """Build a configuration by its identity, for the batch of the problem.

    The plan computes alpha * convolution + beta * (old value of the result), which is not read if
    beta is 0. Without views, tensors are contiguous.
    """
    index, knobs, bias = parse_identity(identity)
    said = f"cuDNN {target.cudnn.version_text} does not compute {problem} by {identity}"
    with _refusals(said):
        # An engine belongs to one graph, and a graph to one batch size, strides and alignments. So
        # each plan gets a new graph and a new engine.
        graph = graph_of(target, problem, views, bias=bias, alpha=alpha, beta=beta)
        config = Descriptor(target.cudnn, DescriptorKind.ENGINECFG)
        config.set_descriptors(Attribute.ENGINECFG_ENGINE, _engine(target, graph, index))
        if knobs:
            choices = [_knob(target, kind, value) for kind, value in knobs]
            config.set_descriptors(Attribute.ENGINECFG_KNOB_CHOICES, *choices)
        plan = Descriptor(target.cudnn, DescriptorKind.EXECUTION_PLAN)
        # `finalize` is where cuDNN decides whether the engine takes these knobs for this graph.
        plan.set_descriptors(Attribute.EXECUTION_PLAN_ENGINE_CONFIG, config.finalize())
        # Without a handle, for a device of another machine, `finalize` only checks the plan: it
        # cannot be executed.
        if target.handle is not None:
            plan.set_handle(Attribute.EXECUTION_PLAN_HANDLE, target.handle)
        plan.finalize()
        workspace_bytes = plan.get_int64(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE)
        uids = (*_OPERAND_UIDS[problem.op], *([BIAS_UID] if bias else []))
        return ExecutionPlan(plan, identity, workspace_bytes, uids)


@contextmanager
def _refusals(said: str) -> Iterator[None]:
    """Raise cuDNN's refusals as UnsupportedErrors whose message begins with `said`."""
    try:
        yield
    except CudnnError as error:
        # A status that is no refusal is a failure of the library or of the device, not of the
        # engine.
        if not error.is_refusal:
            raise
        raise UnsupportedError(f"{said}: {error}") from error


def parse_identity(identity: str) -> tuple[int, list[tuple[int, int]], bool]:
    """Parse an identity: engine index, (knob, value) pairs, whether it also adds a bias.

    >>> parse_identity("bias_eng41_k2=3_k12=-1")
    (41, [(2, 3), (12, -1)], True)
    """
    match = _IDENTITY.fullmatch(identity)
    if match is None:
        raise UnsupportedError(
            f"the name of a cuDNN engine configuration is like eng67_k2=20_k13=0, got {identity!r}"
        )
    # The text before the first "_k" is empty.
    knobs = [part.split("=") for part in match["knobs"].split("_k")[1:]]
    return (
        int(match["engine"]),
        [(int(kind), int(value)) for kind, value in knobs],
        bool(match["bias"]),
    )


def _engine(target: Target, graph: Descriptor, index: int) -> Descriptor:
    engine = Descriptor(target.cudnn, DescriptorKind.ENGINE)
    engine.set_descriptors(Attribute.ENGINE_OPERATION_GRAPH, graph)
    engine.set_int64(Attribute.ENGINE_GLOBAL_INDEX, index)
    if target.device is not None:
        engine.set_descriptors(Attribute.ENGINE_DEVICEPROP, target.device)
    return engine.finalize()


def _knob(target: Target, kind: int, value: int) -> Descriptor:
    knob = Descriptor(target.cudnn, DescriptorKind.KNOB_CHOICE)
    knob.set_enum(Attribute.KNOB_CHOICE_KNOB_TYPE, Type.KNOB_TYPE, kind)
    knob.set_int64(Attribute.KNOB_CHOICE_KNOB_VALUE, value)
    return knob.finalize()
