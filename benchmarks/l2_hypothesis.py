"""Do chunks whose layout copies stay in the L2 cache beat the undivided convolution of any memory?

    python benchmarks/l2_hypothesis.py --out benchmarks/results/h200 --minutes 9
    python benchmarks/l2_hypothesis.py --device cpu --l2-mib 64 --minutes 2 --out out

On NCHW tensors most kernels copy their operands into NHWC; that copy is their workspace. For every
layer whose operands exceed the cache, two plans are made: the fastest undivided kernel without any
limit, and the fastest split (along the batch or in slabs) whose workspace is at most a share of the
cache. Both are tuned for all layers at once, each within --tuning of the time. Then they run
through the dispatcher in turn, beside torch's own choice, layer by layer. The hypothesis: at least
1.15 times as fast in the geometric mean. Layers whose second plan is undivided test nothing and are
counted apart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from gpu_tables import LEAST_GAIN, geometric_mean, table
from step_workers import usual_options

import ucudnn
from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.kernels.tune import tune_problems
from ucudnn.layer_table import read_rows
from ucudnn.problem import OPS, Problem
from ucudnn.units import format_ns

CLAIMED_GAIN = 1.15
LAYERS = Path(__file__).parent / "layers"
TABLES = ("alexnet_ucudnn_csv", "resnet50_n256", "nnunet_3d_fullres_n2", "resnet18_n128")
DTYPES = {"tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
ROUNDS = 9
WARM_CALLS = 2


@dataclass
class Trial:
    """One problem: its undivided and its divided plan, timed in turn.

    Args:
        layer: table and name.
        problem: as text.
        op: "fprop", "dgrad" or "wgrad".
        dtype: "tf32", "fp16" or "bf16".
        samples_ns: by contender: "undivided", "divided" and "torch".
        splits: by plan, as text.
        workspace_bytes: by plan.
        chunks: of the divided plan.
        failed: why it was not timed.
    """

    layer: str
    problem: str
    op: str
    dtype: str
    samples_ns: dict[str, list[int]] = field(default_factory=dict)
    splits: dict[str, str] = field(default_factory=dict)
    workspace_bytes: dict[str, int] = field(default_factory=dict)
    chunks: int = 0
    failed: str | None = None

    @property
    def tests(self) -> bool:
        """True where there is something to compare."""
        return self.chunks > 1 and all(self.samples_ns.values()) and bool(self.samples_ns)

    def gain(self) -> tuple[float, float, float]:
        """The undivided plan's time over the divided one's, with its 95 % interval."""
        return ratio_interval(self.samples_ns["undivided"], self.samples_ns["divided"])


def operand_bytes(problem: Problem) -> int:
    """Bytes of x and y, which is what a kernel copies.

    >>> operand_bytes(Problem("fprop", 1, 4, 8, (10,), (1,)))
    480
    """
    shapes = (problem.x_shape, problem.y_shape)
    return sum(torch.Size(shape).numel() for shape in shapes) * problem.bytes_per_element


def problems(options: argparse.Namespace, l2_bytes: int) -> Iterator[tuple[str, str, Problem]]:
    """(layer, dtype, problem) of every distinct problem beyond the cache, in order of dtypes."""
    for dtype in options.dtypes.split(","):
        seen = set()
        for path in options.tables:
            for name, problem, *_ in read_rows(path, options.ops.split(","), DTYPES[dtype], "nchw"):
                wanted = replace(problem, math="tf32") if dtype == "tf32" else problem
                if options.device == "cpu":
                    wanted = problem
                if wanted not in seen and operand_bytes(wanted) > l2_bytes:
                    seen.add(wanted)
                    yield f"{Path(path).stem}:{name}", dtype, wanted


def call(problem: Problem, device: str) -> Callable[[], Any]:
    """The convolution as a model would call it, through aten, on random operands."""
    dtype = getattr(torch, problem.dtype)
    shapes = (problem.x_shape, problem.w_shape, problem.y_shape)
    x, w, dy = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    padding = [before for before, _ in problem.padding]
    geometry = [list(problem.stride), padding, list(problem.dilation)]
    geometry += [False, [0] * len(padding), problem.groups]
    if problem.op == "fprop":
        return lambda: torch.ops.aten.convolution(x, w, None, *geometry)
    mask = [problem.op == "dgrad", problem.op == "wgrad", False]
    return lambda: torch.ops.aten.convolution_backward(dy, x, w, None, *geometry, mask)


def elapsed_ns(run: Callable[[], Any], device: str) -> int:
    """Time of one call after calls that warm up."""
    for _ in range(WARM_CALLS):
        run()
    if device == "cpu":
        start_ns = time.perf_counter_ns()
        run()
        return time.perf_counter_ns() - start_ns
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return round(start.elapsed_time(end) * 1e6)


def tune(
    layers: Sequence[tuple[str, Problem]], options: argparse.Namespace, limit: int
) -> dict[str, ucudnn.Plan]:
    """Both plans of some layers; each starts one process that measures all of them."""
    seconds = 60 * options.minutes * options.tuning
    settings = {
        "backend": "torch_cpu" if options.device == "cpu" else "auto",
        "time_budget_s": seconds,
        **options.config,
    }
    return {
        "undivided": tune_problems(layers, ucudnn.Config(policy="undivided", **settings)),
        "divided": tune_problems(layers, ucudnn.Config(workspace_limit=limit, **settings)),
    }


def run_trial(
    trial: Trial, problem: Problem, plans: Mapping[str, ucudnn.Plan], device: str
) -> None:
    """Time both plans and torch's own choice, round after round."""
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {"torch": nullcontext}
    for name, plan in plans.items():
        kernel = next(one for one in plan.kernels if one.problem == problem)
        split = kernel.split(problem.batch)
        trial.splits[name] = f"{split.axis}: {split}"
        trial.workspace_bytes[name] = kernel.timing.workspace_bytes
        trial.chunks = len(split.chunks)  # in the end, of the divided plan
        contexts[name] = lambda plan=plan: ucudnn.installed(plan)
    run = call(problem, device)
    samples: dict[str, list[int]] = {name: [] for name in contexts}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, context in contexts.items():
                with context():
                    samples[name].append(elapsed_ns(run, device))
    trial.samples_ns = samples


def report(trials: Sequence[Trial]) -> Iterator[str]:
    """A table of all trials, the worst first, and per dtype and op what they say together."""
    tested = sorted((one for one in trials if one.tests), key=lambda one: one.gain()[0])
    rows = []
    for one in tested:
        ratio, low, high = one.gain()
        times = [
            f"{format_ns(median_ns(taken))} ± {format_ns(spread_ns(taken))}"
            for taken in (one.samples_ns[name] for name in ("undivided", "divided", "torch"))
        ]
        sizes = [f"{one.workspace_bytes[name] / 2**20:.0f}" for name in ("undivided", "divided")]
        gain = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
        rows.append((one.layer, one.op, one.dtype, gain, *times, *sizes, one.splits["divided"]))
    columns = "layer | op | dtype | gain | undivided | divided | torch | its MiB | ours MiB | split"
    yield table("Divided within the cache against undivided without a limit", columns, rows)
    kinds = sorted({(one.dtype, one.op) for one in tested})
    for dtype, op in kinds:
        yield verdict(
            f"{dtype} {op}", [one for one in tested if (one.dtype, one.op) == (dtype, op)]
        )
    yield verdict("all", tested)
    whole = sum(one.chunks == 1 for one in trials)
    yield f"{whole} of {len(trials)} problems stay undivided even within the cache."
    for reason in dict.fromkeys(one.failed for one in trials if one.failed):
        yield f"not timed: {reason}"


def verdict(name: str, trials: Sequence[Trial]) -> str:
    """What some trials say of the hypothesis.

    >>> verdict("all", [])
    'all: not decided: no problem was divided'
    """
    if not trials:
        return f"{name}: not decided: no problem was divided"
    gains = [trial.gain()[0] for trial in trials]
    mean = geometric_mean(gains)
    wins = sum(gain > 1 + LEAST_GAIN for gain in gains)
    losses = sum(gain < 1 - LEAST_GAIN for gain in gains)
    holds = "HOLDS" if mean >= CLAIMED_GAIN else "REFUTED"
    return (
        f"{name}: {holds}: geo-mean {mean:.2f} of {len(gains)} problems (claimed {CLAIMED_GAIN}), "
        f"{wins} gain and {losses} lose more than {LEAST_GAIN:.0%}, best {max(gains):.2f}, worst "
        f"{min(gains):.2f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = usual_options(__doc__, "l2_hypothesis.json")
    parser.add_argument("--tables", nargs="+", default=[LAYERS / f"{name}.csv" for name in TABLES])
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--dtypes", default="tf32,fp16")
    parser.add_argument("--share", type=float, default=0.5, help="of L2 that a workspace may take")
    parser.add_argument("--tuning", type=float, default=0.4, help="of --minutes, for each plan")
    parser.add_argument("--l2-mib", type=float, help="default: what the GPU says")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    l2_bytes = int((options.l2_mib or 0) * 2**20)
    device = options.device
    if options.device == "cuda":
        device = torch.cuda.get_device_name()
        torch.backends.cudnn.allow_tf32 = True
        l2_bytes = l2_bytes or torch.cuda.get_device_properties(0).L2_cache_size
    trials: list[Trial] = []
    path = options.out / "l2_hypothesis.json"
    options.out.mkdir(parents=True, exist_ok=True)
    limit = int(options.share * l2_bytes)
    found = list(problems(options, l2_bytes))
    try:
        together = tune([(layer, problem) for layer, _, problem in found], options, limit)
    except ucudnn.UcudnnError as error:  # such as one layer that nothing within the limit computes
        print(f"every layer is tuned alone: {error}")
        together = None
    for layer, dtype, problem in found:
        if time.monotonic() > deadline:
            print("time is up: later problems were not reached")
            break
        trial = Trial(layer, str(problem), problem.op, dtype)
        try:
            plans = together or tune([(layer, problem)], options, limit)
            run_trial(trial, problem, plans, options.device)
        except (ucudnn.UcudnnError, RuntimeError) as error:  # a layer that fails is a result
            trial.failed = f"{problem}: {type(error).__name__}: {error}"[:400]
        trials.append(trial)
        document = {"device": device, "l2_bytes": l2_bytes, "share": options.share}
        document["torch"] = torch.__version__
        document |= {"trials": [asdict(one) for one in trials], "says": list(report(trials))}
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{trial.problem}: {trial.failed or trial.splits['divided']}", flush=True)
    print("\n".join(report(trials)))


if __name__ == "__main__":
    main()
