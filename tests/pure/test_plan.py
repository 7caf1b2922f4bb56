"""Plan: every batch has a split; a file gives back the plan it was written from, or a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from by_hand import signed
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.config import Config
from ucudnn.errors import ConfigError, PlanError, PlanFileError
from ucudnn.layer_table import read_rows
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.outcomes import Origin
from ucudnn.plan import BY_SLABS, DEFAULT_ALGORITHM, Chunk, KernelPlan, Plan, Split, Timing
from ucudnn.problem import Problem

PERTURBED = "timed while others used the processors"
TIMING = Timing(time_ns=900, spread_ns=9, workspace_bytes=4096, samples=7)
DEFAULT = Timing(time_ns=1000, spread_ns=11, workspace_bytes=8192, samples=7)


def kernel(op: str = "fprop", **changes: Any) -> KernelPlan:
    """A kernel for batches 1..5: 1 and 2 computed alone, 3 to 5 in chunks of at most 2."""
    fields: dict[str, Any] = {
        "problem": Problem(op, 5, 4, 4, (9, 9), (3, 3)),
        "layers": ("stem", "body.0"),
        "algorithms": ("torch_default", "onednn", "gemm"),
        "alone": (1, 0, -1, -1, -1),
        "last": ((1, 2), (2, 1), (1, 2), (2, 1), (1, 2)),
        "predicted_time_ns": 800,
        "timing": TIMING,
        "default": DEFAULT,
        "notes": ("default kernel=onednn",),
    }
    return KernelPlan(**{**fields, **changes})


def plan(*kernels: KernelPlan, **changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "kernels": kernels or (kernel("fprop"), kernel("dgrad")),
        "device": Device("cpu", "Example CPU", isa="AVX2", cores=2),
        "software": Software("2.13.0"),
        "conditions": Conditions(threads=2),
        "config": Config(workspace_limit="8KiB"),
    }
    return Plan(**{**fields, **changes})


# Splits


def test_each_batch_is_alone_or_the_walk_of_its_last_steps() -> None:
    splits = [
        [(chunk.size, chunk.algorithm) for chunk in kernel().split(n).chunks] for n in range(1, 6)
    ]
    assert splits == [
        [(1, "onednn")],
        [(2, "torch_default")],
        [(2, "onednn"), (1, "gemm")],
        [(2, "onednn"), (2, "onednn")],
        [(2, "onednn"), (2, "onednn"), (1, "gemm")],
    ]


@st.composite
def tables(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """`alone` and `last` of a kernel with two algorithms, as a solver may fill them."""
    alone, last, reachable = [], [], {0}
    for n in range(1, draw(st.integers(1, 30)) + 1):
        sizes = [0, *(n - start for start in reachable)]
        size = draw(st.sampled_from(sizes))
        last.append((size, draw(st.integers(0, 1)) if size else -1))
        alone.append(draw(st.integers(-1 if size else 0, 1)))
        if size:
            reachable.add(n)
    return tuple(alone), tuple(last)


@given(tables())
def test_every_split_covers_its_batch(
    table: tuple[tuple[int, ...], tuple[tuple[int, int], ...]],
) -> None:
    alone, last = table
    problem = Problem("wgrad", len(alone), 4, 4, (9,), (3,))
    value = kernel(problem=problem, algorithms=("a", "b"), alone=alone, last=last)
    for n in range(1, len(alone) + 1):
        split = value.split(n)
        assert split.axis == "batch"
        assert sum(chunk.size for chunk in split.chunks) == split.size == n
        assert all(chunk.size > 0 and chunk.algorithm in ("a", "b") for chunk in split.chunks)
        assert (len(split.chunks) == 1) or alone[n - 1] == -1


@pytest.mark.parametrize("batch", [0, -1, 6])
def test_other_batches_are_refused(batch: int) -> None:
    with pytest.raises(PlanError, match=f"planned for batches 1 to 5, got {batch}; tune with"):
        kernel().split(batch)


@pytest.mark.parametrize(
    "changes",
    [
        {"alone": (1, 0, -1, -1)},
        {"last": ((1, 2), (2, 1), (1, 2), (2, 1))},
        {"alone": (1, 0, -1, -1, 3)},
        {"last": ((1, 2), (2, 1), (1, 2), (2, 1), (1, 3))},
        {"last": ((1, 2), (2, 1), (1, 2), (2, 1), (1, -1))},
        {"last": ((1, 2), (2, 1), (1, 2), (2, 1), (6, 2))},
        {"last": ((1, 2), (2, 1), (1, 2), (2, 1), (-1, 2))},
        {"last": ((1, 2), (2, 1), (1, 2), (2, 1), (0, -1))},
        {"last": ((0, -1), (0, -1), (1, 2), (2, 1), (1, 2))},
        {"alone": (), "last": ()},
    ],
    ids=str,
)
def test_a_table_without_a_split_of_every_batch_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="the plan of fprop conv2d"):
        kernel(**changes)


def test_default_means_torchs_own_undivided_convolution() -> None:
    assert Split("batch", (Chunk(5, "torch_default"),)).is_default
    assert not Split("batch", (Chunk(5, "onednn"),)).is_default
    assert not Split("batch", (Chunk(3, "torch_default"), Chunk(2, "torch_default"))).is_default
    assert not kernel().is_default
    assert kernel(alone=(1, 0, -1, -1, 0)).is_default


def sliced(**changes: Any) -> KernelPlan:
    """A kernel of 7 output rows for batches 1..2: both by slabs of 4 and 3 rows."""
    fields: dict[str, Any] = {
        "problem": Problem("fprop", 2, 4, 4, (9, 9), (3, 3)),
        "alone": (-2, -2),
        "last": ((0, -1), (0, -1)),
        "slabs": ((4, 1), (3, 2)),
    }
    return kernel(**{**fields, **changes})


def test_a_batch_may_be_split_otherwise() -> None:
    value = sliced(alone=(1, -2))
    assert value.split(1).axis == "batch"
    assert value.split(2).axis == "spatial"
    value = sliced(alone=(-1, -2))
    assert not value.covers(1)


@pytest.mark.parametrize(
    "slabs",
    [(), ((4, 1),), ((4, 1), (4, 2)), ((7, 3),), ((7, -1),), ((8, 1), (-1, 1)), ((0, 1), (7, 1))],
    ids=str,
)
def test_slabs_that_are_not_the_rows_are_refused(slabs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PlanError, match="must have slabs of 7 rows altogether, got"):
        sliced(slabs=slabs)


def test_a_problem_finds_the_smallest_kernel_that_covers_it() -> None:
    large = kernel(
        problem=kernel().problem.with_batch(6), alone=(0,) * 6, last=((0, -1),) * 6, notes=()
    )
    value = plan(large, kernel())
    for batch, expected in [(1, kernel()), (5, kernel()), (6, large)]:
        problem = kernel().problem.with_batch(batch)
        assert value.kernel(problem) == expected
        assert value.split(problem) == expected.split(batch)
        assert value.covers(problem)


def test_an_unplanned_problem_is_refused_with_the_remedy() -> None:
    larger = kernel().problem.with_batch(6)
    other = replace(kernel().problem, kernel_size=(1, 1))
    assert not plan().covers(larger)
    assert not plan().covers(other)
    with pytest.raises(PlanError, match="only up to batch 5; tune with a larger example input"):
        plan().split(larger)
    with pytest.raises(PlanError, match="not among the 2 kernels of this plan; tune with"):
        plan().split(other)


# Batches without a split, kernels given back to torch, pools

# Batch 1 has no split within the limit; 3 is slabs, the others are in chunks of at most 2.
KERNEL = kernel(
    algorithms=("onednn", "gemm"),
    alone=(-1, 0, BY_SLABS, -1, 1),
    last=((0, -1), (2, 0), (0, -1), (2, 1), (0, -1)),
    slabs=((4, 0), (3, 1)),
)


def test_a_batch_within_no_limit_says_so_also_through_the_plan() -> None:
    assert [batch for batch in range(7) if KERNEL.covers(batch)] == [2, 3, 4, 5]
    with pytest.raises(PlanError, match="has no plan for batch 1: nothing that was timed"):
        KERNEL.split(1)
    whole = plan(KERNEL)
    assert not whole.covers(KERNEL.problem.with_batch(1))
    assert whole.kernel(KERNEL.problem.with_batch(1)) is KERNEL


def test_a_plan_is_completed_by_splits_of_a_smaller_batch() -> None:
    whole = replace(
        KERNEL, alone=(-1, -1, -1, -1, 1), last=((0, -1),) * 5, slabs=(), algorithms=("gemm", "fft")
    )
    smaller = replace(
        KERNEL,
        problem=KERNEL.problem.with_batch(4),
        algorithms=("onednn", "gemm"),
        alone=(1, BY_SLABS, -1, -1),
        last=((1, 1), (0, -1), (2, 0), (1, 0)),
    )
    completed = whole.completed_by(smaller)
    assert completed.uncovered() == []
    for batch in range(1, 5):
        assert completed.split(batch) == smaller.split(batch)
    assert completed.split(5) == whole.split(5)
    # of a plan that has slabs already no others are taken
    assert replace(KERNEL, alone=(-1, -1, BY_SLABS, -1, 1)).completed_by(smaller).uncovered() == []
    assert KERNEL.with_default([1]).split(1).is_default
    assert KERNEL.completed_by(smaller).split(3) == KERNEL.split(3)


def test_given_back_at_every_batch() -> None:
    back = KERNEL.by_default(every_batch=True)
    for batch in range(1, 6):
        assert str(back.split(batch)) == f"{batch} {DEFAULT_ALGORITHM}"
    assert (back.timing, back.predicted_time_ns, back.slabs) == (DEFAULT, 1000, ())


def test_given_back_at_the_planned_batch_alone() -> None:
    back = KERNEL.by_default(every_batch=False)
    assert str(back.split(5)) == f"5 {DEFAULT_ALGORITHM}"
    for batch in range(2, 5):
        assert str(back.split(batch)) == str(KERNEL.split(batch))
    assert not back.covers(1)
    assert back.slabs == KERNEL.slabs
    whole = replace(KERNEL, alone=(-1, 0, 0, -1, BY_SLABS))
    assert whole.by_default(every_batch=False).slabs == ()


def test_a_pool_holds_every_call_and_other_workspace_is_shared() -> None:
    small = kernel("wgrad", timing=replace(TIMING, workspace_bytes=100), layers=("stem",))
    config = Config(total_workspace="1MiB")
    assert plan(KERNEL, small, config=config).workspace_bytes == 2 * 4096 + 100
    assert plan(KERNEL, small).workspace_bytes == 4096
    assert plan(kernels=()).workspace_bytes == 0
    # Each of the two calls of a kernel may also take half of what is left of the pool.
    left = (1 << 20) - 2 * 4096 - 100
    assert plan(KERNEL, small, config=config).limit_bytes(KERNEL) == 4096 + left // 2
    assert plan(KERNEL, small, config=config).limit_bytes(small) == 100 + left
    least = replace(config, workspace_limit=4096)
    assert plan(KERNEL, small, config=least).limit_bytes(KERNEL) == 4096


# Hash

SAME = {
    "times": plan(kernel("fprop", timing=DEFAULT, default=TIMING), kernel("dgrad")),
    "predicted time": plan(kernel("fprop", predicted_time_ns=1), kernel("dgrad")),
    "order of kernels": plan(kernel("dgrad"), kernel("fprop")),
    "names of layers": plan(kernel("fprop", layers=("other",)), kernel("dgrad")),
    "notes": plan(kernel("fprop", notes=()), kernel("dgrad")),
    "what is live": plan(kernel("fprop", live_bytes=77), kernel("dgrad")),
    "order of algorithms": plan(
        kernel(
            "fprop",
            algorithms=("gemm", "unused", "onednn", "torch_default"),
            alone=(2, 3, -1, -1, -1),
            last=((1, 0), (2, 2), (1, 0), (2, 2), (1, 0)),
        ),
        kernel("dgrad"),
    ),
    "cache": plan(config=Config(workspace_limit="8KiB", cache="elsewhere")),
    "how the limit was written": plan(config=Config(workspace_limit=8192)),
}
OTHER = {
    "a problem": plan(kernel("fprop"), kernel("wgrad")),
    "a split": plan(kernel("fprop", alone=(1, 0, -1, -1, 0)), kernel("dgrad")),
    "a smaller batch": plan(kernel("fprop", alone=(0, 0, -1, -1, -1)), kernel("dgrad")),
    "an algorithm": plan(kernel("fprop", algorithms=("torch_default", "fft", "gemm"))),
    "the limit": plan(config=Config(workspace_limit="9KiB")),
    "slabs": plan(sliced(), kernel("dgrad")),
    "the device": plan(device=Device("cpu", "Another CPU", isa="AVX2", cores=2)),
}


@pytest.mark.parametrize("other", SAME.values(), ids=SAME)
def test_the_hash_does_not_depend_on(other: Plan) -> None:
    assert other.hash == plan().hash


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_the_hash_depends_on(other: Plan) -> None:
    assert other.hash != plan().hash


# Files


@pytest.mark.parametrize(
    "value",
    [
        plan(),
        plan(sliced(), kernel("dgrad")),
        plan(
            kernel(is_perturbed=True, live_bytes=77),
            kernel("dgrad", default_is_deterministic=False),
        ),
    ],
    ids=["by batch", "by slabs", "with remarks"],
)
def test_a_file_gives_the_plan_back(value: Plan, tmp_path: Path) -> None:
    path = tmp_path / "a.plan.json"
    value.save(path)
    assert list(tmp_path.iterdir()) == [path]
    again = Plan.load(str(path))
    assert (again, again.hash) == (value, value.hash)
    assert again.config.to_dict() == value.config.to_dict()


def test_others_on_the_machine_are_remarked_on_and_what_varies_is_not() -> None:
    assert kernel(is_perturbed=True).remarks == ("default kernel=onednn", PERTURBED)
    assert kernel(default_is_deterministic=False).remarks == ("default kernel=onednn",)


def test_an_unwritable_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot write the plan to .*missing"):
        plan().save(tmp_path / "missing" / "a.plan.json")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(PlanError, match="cannot write the plan to .*folder"):
        plan().save(folder)
    assert list(tmp_path.iterdir()) == [folder]


NOT_PLANS = [
    (b"", "is not a plan: it is not valid JSON"),
    (b"\xff\xfe\x00", "cannot read the plan .*: it is not text"),
    (b"[1, 2]", "is not a plan: it has no field format='ucudnn-plan'"),
    (b'{"format": "other"}', "is not a plan: it has no field format='ucudnn-plan'"),
    (b"null", "is not a plan: it has no field format"),
    (b"[" * 100_000, "is not a plan: it is not valid JSON"),
    (b'{"format": "ucudnn-plan", "deep": ' + b"[" * 50 + b"]" * 50 + b"}", "deeper than 32 levels"),
]


@pytest.mark.parametrize(("content", "sentence"), NOT_PLANS, ids=lambda value: str(value)[:20])
def test_other_files_are_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=sentence):
        Plan.load(path)


@pytest.mark.parametrize("version", [0, 2, "3", None])
def test_another_version_is_refused(tmp_path: Path, version: object) -> None:
    path = rewritten(tmp_path, lambda document: document.update(version=version))
    with pytest.raises(PlanError, match="format version .*, this ucudnn reads 5; make it"):
        Plan.load(path)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A plan's file with its document changed by hand; the hash is as it was."""
    path = folder / "a.plan.json"
    plan().save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no hash": lambda document: document.pop("hash"),
    "another hash": lambda document: document.update(hash="0" * 64),
    "a kernel less": lambda document: document["kernels"].pop(),
    "another size": lambda document: first(document)["last"].__setitem__(4, [2, 2]),
    "an error beyond all floats": lambda document: document["config"].update(max_error=10**400),
}


def first(document: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = document["kernels"][0]
    return fields


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused(
    tmp_path: Path, damage: Callable[[dict[str, Any]], object]
) -> None:
    path = rewritten(tmp_path, damage)
    with pytest.raises(PlanError, match=r"a\.plan\.json is a damaged plan: .*; make it anew"):
        Plan.load(path)


def resigned(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The same with a right checksum, as by one who works it out, too."""
    path = rewritten(folder, change)
    return signed(json.loads(path.read_text()), path)


SIGNED: list[tuple[str, object, str]] = [
    ("alone", [1, 0, -1, -1, 1.0], "Expected `int`, got `float`"),
    ("alone", [1, 0, -1, -1, True], "Expected `int`, got `bool`"),
    ("last", [[1, 2], [2, 1], [1, 2], [2, 1], [1.0, 2]], "Expected `int`, got `float`"),
    ("slabs", [[7, 1, 1]], "Expected `array` of length 2"),
    ("algorithms", ["torch_default", "onednn", 3], "Expected `str`, got `int`"),
    ("layers", "stem", "Expected `array`, got `str`"),
    ("is_perturbed", 1, "Expected `bool`, got `int`"),
    ("predicted_time_ns", 2**63, "Expected `int` <= 9223372036854775807"),
    ("timing", {**asdict(TIMING), "time_ns": 0}, "Expected `int` >= 1"),
    ("live_bytes", -1, "Expected `int` >= 0"),
    ("problem", {**asdict(kernel().problem), "groups": 3}, "must be divisible by groups"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), SIGNED)
def test_a_signed_value_that_cannot_be_is_refused_with_its_place(
    name: str, value: object, sentence: str, tmp_path: Path
) -> None:
    path = resigned(tmp_path, lambda document: first(document).update({name: value}))
    with pytest.raises(PlanFileError, match=f"{sentence}.* at `[$].kernels.0..{name}"):
        Plan.load(path)


def test_a_long_value_of_a_signed_file_makes_a_short_sentence(tmp_path: Path) -> None:
    path = resigned(tmp_path, lambda one: one["conditions"].update(role="x" * 10_000))
    with pytest.raises(PlanFileError, match="is a damaged plan: Invalid enum value") as caught:
        Plan.load(path)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


def test_the_environment_gives_the_cache_and_nothing_that_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = tmp_path / "a.plan.json", plan()
    expected.save(path)
    monkeypatch.setenv("UCUDNN_POLICY", "all")
    monkeypatch.setenv("UCUDNN_CACHE", "elsewhere")
    assert Plan.load(path).config == replace(expected.config, cache="elsewhere")
    assert Plan.load(path).hash == expected.hash


def test_a_refused_variable_does_not_make_a_plan_look_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan().save(tmp_path / "a.plan.json")
    monkeypatch.setenv("UCUDNN_DATABASE", "some.db")
    with pytest.raises(ConfigError, match="UCUDNN_DATABASE is not supported"):
        Plan.load(tmp_path / "a.plan.json")


def test_resnet50_at_256_stays_under_one_mebibyte(tmp_path: Path, repository: Path) -> None:
    path = repository / "benchmarks/layers/resnet50_n256.csv"
    problems = [
        replace(problem, op=op)
        for problem in dict.fromkeys(row.problem for row in read_rows(path, ops=("fprop",)))
        for op in ("fprop", "dgrad", "wgrad")
    ]
    assert len(problems) == 69
    # Nothing repeats that a compact writing could use: sizes and algorithms change at every batch.
    names = tuple(f"algorithm_with_a_long_name_{index}" for index in range(12))
    last = tuple((1 + n * n % (n + 1), n % 12) for n in range(256))
    kernels = [
        kernel(
            problem=problem,
            layers=tuple(f"layer4.{block}.conv2" for block in range(6)),
            algorithms=names,
            alone=tuple(n % 12 for n in range(256)),
            last=last,
        )
        for problem in problems
    ]
    path = tmp_path / "resnet50.plan.json"
    plan(*kernels).save(path)
    assert path.stat().st_size < 1 << 20
    again = Plan.load(path)
    assert [again.split(problem).size for problem in problems] == [256] * 69


def test_a_file_says_where_it_is_from_and_the_hash_does_not(tmp_path) -> None:
    origin = Origin("net.py:net", ("8x3x9x9 float32",), "2026-01-31T12:00:00Z", "1.2", 5, "quick")
    origin = replace(origin, left_out=("fprop conv2d(3->4, k3, 9x9) at batch 8",), seconds=3)
    plain = plan(kernels=())
    described = replace(plain, origin=origin)
    assert (described.hash, described) == (plain.hash, plain)
    path = tmp_path / "plan.json"
    described.save(path)
    loaded = Plan.load(path)
    assert loaded.origin == origin
    assert loaded.left_out == origin.left_out
    assert "1 left out" in repr(loaded)
    assert "net.py:net, on 8x3x9x9 float32, made 2026-01-31T12:00:00Z" in str(origin)


def test_plans_are_short_to_print() -> None:
    plain = plan(kernels=())
    assert repr(plain).startswith(f"<Plan {plain.hash[:8]}: 0 kernels")
    assert len(repr(plain)) < 200
