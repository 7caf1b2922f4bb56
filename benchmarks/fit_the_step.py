"""Training steps within less memory: torch, its checkpoints, its compiler, and plans.

    python benchmarks/fit_the_step.py --out fit_the_step.json          # all networks, an hour
    python benchmarks/fit_the_step.py segresnet convnext --rounds 5
    python benchmarks/fit_the_step.py resnet50 --device cuda --shape 256,3,224,224 --no-compile
    python benchmarks/fit_the_step.py segresnet --budget-of checkpoint,compile --out fit.json

Each network is tuned in a process of its own. Its ways run in turn, on the same weights and inputs;
on a CPU each has a process of its own, as for its user, because malloc keeps what other ways have
freed. Peaks are torch's allocator's own count, with parameters and inputs. Beside the measured peak
and time of a way is what was foreseen of it, without running it; a compiled way is not foreseen.

The file is written after each way and each round, so a run that is cut off keeps what it has. The
last rounds have all ways in turn. A way that they do not reach has the times of one step by torch
and one by itself, in the process that tuned ("beside_torch_ns"). Plans are saved beside the file.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._functorch.config as compiler
from networks import Decoder, SuperResolution, frozen, hugging_face, plain, unet3d
from provenance import provenance
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ucudnn
from ucudnn.advice import LARGE_THRESHOLD_TUNABLES
from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.errors import UcudnnError, first_line
from ucudnn.steps.run import cropped, tensors_of

FEW = 4
# Ways by torch in less memory, by the names that --budget-of has for them.
RIVALS = {"checkpoint": "torch.utils.checkpoint", "compile": "torch.compile, activation budget 0.5"}
INFERENCE = "resnet50-inference"
KEEPING = "eager, malloc that keeps blocks"


class Case(NamedTuple):
    """A network, the shape of its input, and the shares of torch's peak that are asked for.

    Args:
        make: makes the network.
        shape: of the input.
        shares: for segments.
        loops: for a loop in micro-batches.
        runs: for each way by checkpoints, how many blocks are one checkpoint.
        infers: True: a step is an inference, in evaluation.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    shares: tuple[str, ...]
    loops: tuple[str, ...] = ()
    runs: tuple[int, ...] = (1,)
    infers: bool = False


def segresnet() -> nn.Module:
    """Of MONAI, with group normalisation."""
    from monai.networks.nets import SegResNet

    network: nn.Module = SegResNet(spatial_dims=3, init_filters=16, in_channels=1, out_channels=2)
    return network


class Denoiser(nn.Module):
    """A diffusion model's UNet at one time step."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import UNet2DModel

        self.unet = UNet2DModel(
            sample_size=64,
            block_out_channels=(64, 128, 128),
            down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
            norm_num_groups=16,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Noise of the same shape."""
        noise: Tensor = self.unet(x, torch.full((len(x),), 10)).sample
        return noise


# The largest share of some networks is the peak by torch.compile.
CASES = {
    "convnext": Case(partial(hugging_face, "ConvNextModel"), (16, 3, 224, 224), ("40%",), ("60%",)),
    "segresnet": Case(segresnet, (4, 1, 64, 64, 64), ("25%",), ("20%", "15%")),
    "denoiser": Case(Denoiser, (8, 3, 64, 64), ("60%", "50%")),
    "hifigan": Case(
        partial(hugging_face, "SpeechT5HifiGan"), (8, 64, 80), ("66%", "50%", "31%"), ("66%", "31%")
    ),
    # At a batch of 4, parameters and their gradients alone are 64 % of the peak.
    "wav2vec2": Case(
        partial(hugging_face, "Wav2Vec2Model", apply_spec_augment=False, layerdrop=0.0),
        (12, 32000),
        ("50%",),
    ),
    "resnet50": Case(partial(plain, "resnet50"), (32, 3, 224, 224), ("50%", "40%", "33%")),
    "unet3d": Case(unet3d, (2, 1, 64, 64, 64), ("65%", "50%")),
    "unet3d-batchnorm": Case(partial(unet3d, "batch"), (2, 1, 64, 64, 64), ("62%",)),
    # One image or volume, which is divided into slabs.
    "superres": Case(SuperResolution, (1, 3, 384, 384), ("33%", "25%"), runs=(1, 4)),
    "superres-512": Case(SuperResolution, (1, 3, 512, 512), ("33%", "25%"), runs=(1, 4)),
    "convnext-one": Case(partial(hugging_face, "ConvNextModel"), (1, 3, 1024, 1024), ("40%",)),
    "resnet50-frozen": Case(partial(frozen, "resnet50"), (1, 3, 800, 1333), ("40%",)),
    "unet3d-one": Case(unet3d, (1, 1, 96, 96, 96), ("46%",)),
    "unet3d-inference": Case(
        partial(unet3d, "batch"), (1, 1, 160, 160, 160), ("45%", "35%"), runs=(), infers=True
    ),
    "vae-decode": Case(Decoder, (1, 4, 128, 128), ("60%",), runs=(), infers=True),
}


class Contestant(NamedTuple):
    """A way to run a step: the model that it runs, and how its batch is cut."""

    model: nn.Module
    plan: ucudnn.Plan | None = None
    tuning_s: float = 0.0
    infers: bool = False

    def step(self, x: Tensor) -> None:
        """Forward, the mean of squares, and backward; or an inference."""
        if self.infers:
            with torch.no_grad():
                self.model(x)
            return
        self.model.zero_grad()
        parts = [x] if self.plan is None else (part[0] for part in self.plan.micro_batches(x))
        for part in parts:
            weight = len(part) / len(x)
            # No name holds the results during backward: they would count in every peak.
            losses = [weight * one.square().mean() for one in tensors_of(self.model(part))]
            torch.autograd.backward(losses)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost members of sequences and lists that hold modules themselves."""
    for child in model.children():
        is_list = isinstance(model, (nn.Sequential, nn.ModuleList))
        if is_list and any(child.children()):
            yield child
        else:
            yield from blocks(child)


def in_runs(blocks: nn.Sequential, run: int, x: Tensor) -> Tensor:
    """The blocks of a sequence, of which so many at a time are a checkpoint."""
    for begin in range(0, len(blocks), run):
        x = checkpoint(blocks[begin : begin + run], x, use_reentrant=False)
    return x


def recompute_(modules: Iterable[nn.Module], **settings: Any) -> None:
    """Make each of the modules a checkpoint, in place."""
    for one in {*modules}:
        again = partial(checkpoint, one.forward, use_reentrant=False, **settings)
        vars(one)["forward"] = again


def checkpointed(model: nn.Module, run: int = 1) -> nn.Module:
    """A copy whose blocks are recomputed, so many of a sequence together."""
    twin = copy.deepcopy(model)
    held = {*blocks(twin)}
    if run == 1:
        recompute_(held)
        return twin
    for one in twin.modules():
        if isinstance(one, nn.Sequential) and held.issuperset(one):
            vars(one)["forward"] = partial(in_runs, one, run)
    return twin


def planned(model: nn.Module, x: Tensor, config: ucudnn.Config) -> Contestant:
    """A copy that follows a plan within a share of torch's peak."""
    began = time.monotonic()
    plan = ucudnn.tune(model, x, config)
    tuning_s = time.monotonic() - began
    return following(plan, config.ops == ("fprop",), model, x)._replace(tuning_s=tuning_s)


# These make a way to run a step of a model, here or in another process.
Entry = Callable[[nn.Module, Tensor], Contestant]


def unchanged(infers: bool, model: nn.Module, _: Tensor) -> Contestant:
    """The model itself."""
    return Contestant(model, infers=infers)


def recomputing(run: int, model: nn.Module, _: Tensor) -> Contestant:
    """A copy by checkpoints, each of so many blocks."""
    return Contestant(checkpointed(model, run))


def following(plan: ucudnn.Plan, infers: bool, model: nn.Module, _: Tensor) -> Contestant:
    """A copy that follows a plan."""
    twin = copy.deepcopy(model)
    ucudnn.convert_(twin, plan)
    return Contestant(twin, plan, infers=infers)


# The graphs that this process has compiled, as their numbers of nodes.
GRAPHS: list[int] = []


def compiled(budget: float, estimator: str, model: nn.Module, _: Tensor) -> Contestant:
    """A copy that is compiled as a whole when it is called, with a budget for its activations."""
    from torch._inductor.compile_fx import compile_fx

    # A backend of its own: Dynamo does not guard the setting, and reads it at each compilation.
    def backend(graph: Any, inputs: Any) -> Any:
        GRAPHS.append(len(graph.graph.nodes))
        settings = {
            "activation_memory_budget": budget,
            "activation_memory_budget_runtime_estimator": estimator,
        }
        with compiler.patch(settings):
            return compile_fx(graph, inputs)

    # `model.compile()` would compile an nn.Sequential child by child.
    whole: Any = torch.compile(copy.deepcopy(model), backend=backend)
    return Contestant(whole)


def keeping_half(model: nn.Module, x: Tensor) -> Contestant:
    """A copy compiled by torch, which may keep half of the activations."""
    contestant = compiled(0.5, "flops", model, x)
    contestant.step(x)
    contestant.step(x[:FEW])
    return contestant


class Losses(nn.Module):
    """The losses of `Contestant.step` as results of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> list[Tensor]:
        """The mean of the squares of each result."""
        return [one.square().mean() for one in tensors_of(self.model(x))]


def foreseen(contestant: Contestant, x: Tensor) -> dict[str, Any]:
    """What was foreseen of a step; of a plan's, beside what tuning measured with its own loss."""
    if contestant.plan is None:
        contestant.model.zero_grad()
        began, config = time.monotonic(), ucudnn.Config(ops=("fprop",))
        if contestant.infers:
            found = ucudnn.foresee(contestant.model, x, config=config)
        else:
            found = ucudnn.foresee(Losses(contestant.model), x)
        return {
            "foreseen_bytes": found.peak_bytes,
            "foreseen_ns": found.time_ns,
            "foreseeing_s": round(time.monotonic() - began, 1),
        }
    memory = contestant.plan.memory
    assert memory is not None
    return {
        "foreseen_bytes": memory.plan_foreseen_bytes,
        "foreseen_ns": memory.plan_foreseen_ns,
        "tuned_peak_bytes": memory.plan_peak_bytes,
        "tuned_ns": memory.plan_ns,
    }


def gradients(contestant: Contestant, x: Tensor) -> list[Tensor]:
    """Those of one step, in the memory of the host; or the results of an inference."""
    torch.manual_seed(1)
    if contestant.infers:
        with torch.no_grad():
            return [one.double().cpu() for one in tensors_of(contestant.model(x))]
    contestant.step(x)
    return [p.grad.double().cpu() for p in contestant.model.parameters() if p.grad is not None]


def deviation(some: list[Tensor], exact: list[Tensor]) -> float:
    """Largest difference of a gradient, of the largest gradient."""
    most = max(float(one.abs().max()) for one in exact)
    return max(float((a - b).abs().max()) for a, b in zip(some, exact, strict=True)) / most


def backend_of(x: Tensor) -> AbstractBackend:
    """The one of the device that a tensor is on."""
    return open_backend("cudnn" if x.is_cuda else "torch_cpu")


def peak_bytes(contestant: Contestant, x: Tensor) -> int:
    """Parameters and inputs, and the most that a step allocates beside them."""
    contestant.model.zero_grad()
    run = partial(contestant.step, x)
    return held_bytes(contestant.model, x) + backend_of(x).workspace_bytes(run, ())


def held_bytes(model: nn.Module, x: Tensor) -> int:
    """Parameters, buffers and inputs."""
    tensors = [*model.parameters(), *model.buffers(), x]
    return sum(one.numel() * one.element_size() for one in tensors)


def allocated_beside(model: nn.Module, x: Tensor) -> int:
    """Bytes of other models on a GPU, which count in a budget that is given in bytes."""
    return max(0, backend_of(x).allocated_bytes() - held_bytes(model, x))


class Asked(NamedTuple):
    """What is asked of the networks.

    Args:
        device: "cpu" or "cuda".
        rounds: in which all ways run in turn.
        compiles: True: torch.compile is a way.
        rivals: keys of `RIVALS`, at whose peaks plans run.
        config: of plans, but for the budget.
    """

    device: str
    rounds: int
    compiles: bool
    rivals: tuple[str, ...]
    config: ucudnn.Config


class Race:
    """The ways of one network: each is measured when it is added, and then they run in turn.

    Args:
        name: of the network.
        case: what is run.
        asked: how.
        out: the file that is written after each way and each round; None: none is.
        before: what the file has of other networks.
    """

    def __init__(
        self,
        name: str,
        case: Case,
        asked: Asked,
        out: Path | None = None,
        before: list[dict[str, Any]] | None = None,
    ) -> None:
        self.model, self.x = drawn(case, asked.device)
        self._case, self._asked, self._out, self._before = case, asked, out, before or []
        self._began = time.monotonic()
        self._ways: dict[str, Contestant] = {}
        self._entries: dict[str, Entry] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._refused: dict[str, str] = {}
        self.found: dict[str, Any] = {
            "network": name,
            "shape": case.shape,
            "made": provenance(),
            "ways": self._rows,
            "refused": self._refused,
        }
        # float64 takes ten times as long: of some samples, of which each has its part in the
        # gradients, or of half of the axes of a single one.
        self._few = self.x[:FEW] if len(self.x) > 1 else cropped(self.x)
        twin = copy.deepcopy(self.model).double()
        self._exact = gradients(Contestant(twin, infers=case.infers), self._few.double())

    def run(self) -> dict[str, Any]:
        """All ways, those by torch first, as JSON values."""
        asked, config = self._asked, self._asked.config
        case = self._case
        config = replace(config, ops=("fprop",)) if case.infers else config
        self._add("torch", partial(unchanged, case.infers))
        for run in case.runs:
            title = RIVALS["checkpoint"] + f" per {run} blocks" * (run > 1)
            self._add(title, partial(recomputing, run))
        if asked.compiles:
            self._add(RIVALS["compile"], keeping_half)
        for rival in asked.rivals:
            if peak := self._rows.get(RIVALS[rival], {}).get("peak_bytes"):
                self._add_plan(f"segments at the peak of {RIVALS[rival]}", config, peak)
        for share in self._case.shares:
            self._add_plan(f"segments within {share}", config, share)
        for share in self._case.loops:
            self._add_plan(f"loop within {share}", replace(config, loop=True), share)
        with ExitStack() as stack:
            steps = self._steps(stack)
            for number in range(asked.rounds + 1):
                taken = {title: step() for title, step in steps.items()}
                if number:  # the first round warms up
                    for title, time_ns in taken.items():
                        self._rows[title]["samples_ns"].append(time_ns)
                    self._write()
        return self.found

    def _steps(self, stack: ExitStack) -> dict[str, Callable[[], int]]:
        """What runs a step of each way, in a process of its own on a CPU, and returns its time."""
        if self.x.is_cuda:
            return {title: partial(self._time_ns, way) for title, way in self._ways.items()}
        return {
            title: partial(
                step_ns, stack.enter_context(serving(partial(entered, self._case, entry)))
            )
            for title, entry in self._entries.items()
        }

    def _add_plan(self, title: str, config: ucudnn.Config, budget: int | str) -> None:
        """A plan within a share of torch's peak, or within bytes for this model alone."""

        def make(model: nn.Module, x: Tensor) -> Contestant:
            within = budget + allocated_beside(model, x) if isinstance(budget, int) else budget
            return planned(model, x, replace(config, memory_budget=within))

        self._add(title, make)

    def _add(self, title: str, entry: Entry) -> None:
        for other in self._ways.values():
            other.model.zero_grad()  # gradients of other ways are no memory of this one
        try:
            way = entry(self.model, self.x)
            self._rows[title] = self._row(title, way)
        # What torch.compile raises is a RuntimeError, and so is a lack of memory.
        except (UcudnnError, RuntimeError) as error:
            self._refused[title] = first_line(error)
        else:
            self._ways[title] = way
            # What was tuned here is only followed there.
            self._entries[title] = (
                entry if way.plan is None else partial(following, way.plan, way.infers)
            )
            # Where torch's own step does not fit, the way has the place of torch.
            self._rows[title]["beside_torch_ns"] = [
                self._time_ns(one) for one in (self._ways.get("torch", way), way)
            ]
            print(f"{self.found['network']}: {title}: {said(self._rows[title])}", flush=True)
        self._write()

    def _row(self, title: str, way: Contestant) -> dict[str, Any]:
        row: dict[str, Any] = {
            "peak_bytes": peak_bytes(way, self.x),
            "deviation": deviation(gradients(way, self._few), self._exact),
            "tuning_s": round(way.tuning_s, 1),
            "segments": 0 if way.plan is None else len(way.plan.segments),
            "micro_batch": None if way.plan is None else way.plan.micro_batch,
            "samples_ns": [],
        }
        if way.plan is not None:
            row |= described(way.plan)
            if self._out is not None:
                file = re.sub(r"[^\w.]+", "-", f"{self._out.stem} {self.found['network']} {title}")
                row["plan"] = f"{file}.plan.json"
                way.plan.save(self._out.with_name(row["plan"]))
        return row if title == RIVALS["compile"] else row | foreseen(way, self.x)

    def _time_ns(self, way: Contestant) -> int:
        return backend_of(self.x).elapsed_ns(partial(way.step, self.x))

    def _write(self) -> None:
        self.found["wall_s"] = round(time.monotonic() - self._began)
        save(self._out, [*self._before, self.found])


def described(plan: ucudnn.Plan) -> dict[str, Any]:
    """What a plan does to a step, in words, and what it says of what it leaves alone."""
    assert plan.origin is not None
    return {
        "budget_bytes": None if plan.memory is None else plan.memory.budget_bytes,
        "divided": [str(one) for one in plan.segments],
        "notes": [
            *(f"{module}: {reason}" for module, reason in plan.reasons),
            *plan.origin.left_out,
            *plan.origin.over_limit,
        ],
    }


def said(row: dict[str, Any]) -> str:
    """Peak and time of a way, and what was foreseen of it."""
    samples = row["samples_ns"] or row["beside_torch_ns"][1:]
    text = f"{row['peak_bytes'] / 2**20:.1f} MiB, {sorted(samples)[len(samples) // 2] / 1e6:.0f} ms"
    if "foreseen_ns" in row:
        mib, ms = row["foreseen_bytes"] / 2**20, row["foreseen_ns"] / 1e6
        text += f"; foreseen {mib:.1f} MiB, {ms:.0f} ms"
    return text


def save(path: Path | None, found: list[dict[str, Any]]) -> None:
    """Write what was found, if there is a file for it: all or nothing."""
    if path is not None:
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(found, indent=1) + "\n")
        temporary.replace(path)


def raced(
    name: str, case: Case, asked: Asked, out: Path | None, before: list[dict[str, Any]]
) -> dict[str, Any]:
    """All ways of one network, as JSON values."""
    return Race(name, case, asked, out, before).run()


def drawn(case: Case, device: str = "cpu") -> tuple[nn.Module, Tensor]:
    """The network of a case and its input, the same in each process."""
    torch.manual_seed(0)
    model = case.make().to(device)
    if case.infers:
        model.eval()
    return model, torch.randn(case.shape, device=device)


def entered(case: Case, entry: Entry) -> tuple[Contestant, Tensor]:
    """A way of a case, and its input."""
    model, x = drawn(case)
    return entry(model, x), x


# What this process runs, and its input.
SERVED: list[tuple[Contestant, Tensor]] = []


def serve(make: Callable[[], tuple[Contestant, Tensor]]) -> None:
    """Have this process run one way."""
    SERVED.append(make())


def served_ns() -> int:
    """The time of a step of this process's way."""
    [(way, x)] = SERVED
    return backend_of(x).elapsed_ns(partial(way.step, x))


def serving(make: Callable[[], tuple[Contestant, Tensor]]) -> ProcessPoolExecutor:
    """A process that runs one way and nothing else."""
    return process(initializer=serve, initargs=(make,))


def step_ns(server: ProcessPoolExecutor) -> int:
    """The time of a step in a process that runs one way."""
    return server.submit(served_ns).result()


def in_memory_format(title: str) -> tuple[nn.Module, Tensor]:
    """ResNet-50 and its input, in the layout that the title of a way names."""
    torch.manual_seed(0)
    model, x = plain("resnet50").eval(), torch.randn(32, 3, 224, 224)
    if title.startswith("channels_last"):
        return (
            model.to(memory_format=torch.channels_last),
            x.to(memory_format=torch.channels_last),
        )
    return model, x


def inference_plan(title: str) -> ucudnn.Plan:
    """A plan for the layout that the title names."""
    return ucudnn.tune(*in_memory_format(title), ucudnn.Config(ops=("fprop",)))


def inferring(title: str, plan: ucudnn.Plan | None) -> tuple[Contestant, Tensor]:
    """A way of the inference, and its input."""
    model, x = in_memory_format(title)
    if plan is not None:
        ucudnn.convert_(model, plan)
    if title.startswith("compiled"):
        model.compile()
    return Contestant(model, infers=True), x


def inferred_here() -> tuple[int, Any]:
    """The peak of this process's way, and its results."""
    [(way, x)] = SERVED
    with torch.no_grad():
        results = way.model(x).numpy()
    return peak_bytes(way, x), results


def process(**settings: Any) -> ProcessPoolExecutor:
    """A process that has run nothing else."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), **settings)


def inferred(rounds: int) -> dict[str, Any]:
    """ResNet-50 in evaluation, in three ways and by the plan of each, as JSON values."""
    plans: dict[str, ucudnn.Plan | None] = {}
    for title in ("eager", "channels_last"):
        with process() as planner:
            plans[title] = None
            plans[f"{title}, plan"] = planner.submit(inference_plan, title).result()
    # A model is compiled after it was converted.
    plans |= {"compiled": None, "compiled, plan": plans["eager, plan"], KEEPING: None}
    samples: dict[str, list[int]] = {title: [] for title in plans}
    with ExitStack() as stack:
        servers = {
            title: stack.enter_context(serving(partial(inferring, title, plan)))
            for title, plan in plans.items()
        }
        for title, server in servers.items():
            keeping = {"GLIBC_TUNABLES": LARGE_THRESHOLD_TUNABLES} if title == KEEPING else {}
            with patch.dict(os.environ, keeping):  # malloc reads it when the process starts
                step_ns(server)
        for _ in range(rounds):
            for title, server in servers.items():
                samples[title].append(step_ns(server))
        # Afterwards, because torch's profiler may leave memory that malloc keeps.
        found = {title: one.submit(inferred_here).result() for title, one in servers.items()}
    exact = found["eager"][1]
    rows = {
        title: {
            "peak_bytes": peak_bytes,
            "deviation": float(abs(results - exact).max() / abs(exact).max()),
            "samples_ns": samples[title],
        }
        for title, (peak_bytes, results) in found.items()
    }
    return {"network": INFERENCE, "shape": (32, 3, 224, 224), "ways": rows, "refused": {}}


def in_a_process(
    name: str, arguments: argparse.Namespace, before: list[dict[str, Any]]
) -> dict[str, Any]:
    """All ways of a network."""
    if name == INFERENCE:
        began = time.monotonic()
        found = inferred(arguments.rounds)
        return {**found, "wall_s": round(time.monotonic() - began), "made": provenance()}
    case = CASES[name]
    if arguments.shape:
        case = case._replace(shape=arguments.shape)
    if arguments.shares or arguments.loops or arguments.budget_of:
        case = case._replace(shares=arguments.shares, loops=arguments.loops)
    asked = Asked(
        *(arguments.device, arguments.rounds, not arguments.no_compile, arguments.budget_of),
        ucudnn.Config(effort="quick", time_budget_s=arguments.time_budget_s),
    )
    with process() as own:
        return own.submit(raced, name, case, asked, arguments.out, before).result()


def listed(text: str) -> tuple[str, ...]:
    """The parts between commas."""
    return tuple(text.split(","))


def shape(text: str) -> tuple[int, ...]:
    """Sizes between commas."""
    return tuple(map(int, text.split(",")))


def main() -> None:
    """Run the networks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", type=shape, help="of the inputs, such as 256,3,224,224")
    parser.add_argument("--shares", type=listed, default=(), help="for segments, such as 50%%,30%%")
    parser.add_argument("--loops", type=listed, default=(), help="shares for loops")
    parser.add_argument(
        *("--budget-of",), type=listed, default=(), help="plans at peaks of: checkpoint,compile"
    )
    parser.add_argument("--time-budget-s", type=float, help="for tuning each plan")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    arguments = parser.parse_args()
    known = [*CASES, INFERENCE] if arguments.device == "cpu" else [*CASES]
    if unknown := set(arguments.networks) - {*known}:
        parser.error(
            f"networks on {arguments.device} must be of {', '.join(known)}, got "
            f"{', '.join(sorted(unknown))}"
        )
    rivals = [name for name in RIVALS if name != "compile" or not arguments.no_compile]
    if unknown := set(arguments.budget_of) - {*rivals}:
        parser.error(f"--budget-of must be of {', '.join(rivals)}, got {', '.join(unknown)}")
    found: list[dict[str, Any]] = []
    for name in arguments.networks or known:
        found.append(in_a_process(name, arguments, found))
        print(f"{name}: all ways in turn")
        for title, row in found[-1]["ways"].items():
            print(f"{name}: {title}: {said(row)}", flush=True)
        for title, reason in found[-1]["refused"].items():
            print(f"{name}: {title}: {reason}", flush=True)
        save(arguments.out, found)


if __name__ == "__main__":
    main()
