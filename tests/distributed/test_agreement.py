"""One plan on all ranks or none: a rank that differs is named before the first step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from by_hand import kernel

from ucudnn import Config, Plan, Problem
from ucudnn.distributed.agreement import require_equal
from ucudnn.errors import RankError
from ucudnn.measurement import Conditions, Device, Software


@pytest.fixture
def plan() -> Plan:
    """For the scripted device: two kernels, each computed undivided or in ones."""
    one = {"algorithms": ("left", "right"), "alone": (0, -1), "last": ((1, 1), (1, 1))}
    kernels = tuple(
        kernel(4, problem=Problem("fprop", 2, channels, 2, (4, 4), (1, 1)), **one)
        for channels in (1, 2)
    )
    device, software = Device("cpu", "scripted", cores=1), Software("0")
    return Plan(kernels, device, software, Conditions(threads=1), Config(), "scripted")


def save(tmp_path: Path, *plans: Plan) -> list[str]:
    paths = []
    for number, plan in enumerate(plans):
        paths.append(str(tmp_path / f"{number}.json"))
        plan.save(paths[-1])
    return paths


@pytest.mark.parametrize("how", ["load", "agree"])
def test_equal_plans_are_followed(launch, tmp_path, plan, how):
    said = launch("agree", 2, paths=save(tmp_path, plan, plan), how=how).end()
    assert [one["hash"] for one in said] == [plan.hash] * 2


@pytest.mark.parametrize("how", ["send", "broadcast"])
def test_the_plan_of_rank_0_is_sent(launch, tmp_path, plan, how):
    said = launch("agree", 4, paths=save(tmp_path, plan), how=how).end()
    assert [one["hash"] for one in said] == [plan.hash] * 4


def test_of_several_files_each_rank_takes_that_of_its_device(launch, tmp_path, plan):
    kinds = [replace(plan, device=Device("cpu", f"kind {number}")) for number in (0, 1)]
    said = launch("agree", 4, paths=save(tmp_path, *kinds), how="send", what="kinds").end()
    assert [one["device"] for one in said] == ["kind 0", "kind 1"] * 2
    said = launch("agree", 2, paths=save(tmp_path, kinds[0]), how="send", what="kinds").end()
    for one in said:
        assert one["ranks"] == [1]
        assert "was made for kind 0, not for the kind 1 of this rank" in one["sentence"]


def edited(plan: Plan, field: str) -> Plan:
    """The plan with one field changed, and everything that checks itself made to fit."""
    first, second = plan.kernels
    if field == "split":
        return replace(plan, kernels=(first, replace(second, algorithms=("left", "left"))))
    if field == "smaller batch":
        return replace(plan, kernels=(first, replace(second, alone=(1, -1))))
    if field == "kernel":
        return replace(plan, kernels=(first,))
    if field == "limit":
        return replace(plan, config=Config(workspace_limit=77))
    if field == "unplanned":
        return replace(plan, config=Config(unplanned="error"))
    assert field == "threads"
    return replace(plan, conditions=Conditions(threads=3))


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("split", "plan of fprop conv2d(2->2, k1, 4x4) at batch 2 is 2x1 left"),
        ("smaller batch", "conv2d(2->2, k1, 4x4) at batch 2 is 2x1 right, over all batches"),
        ("kernel", "plan of fprop conv2d(2->2, k1, 4x4) at batch 2 is not there on rank 2"),
        ("limit", "plan's workspace_limit is 77 on rank 2, but None on ranks 0, 1"),
        ("unplanned", "plan's unplanned is error on rank 2, but torch on ranks 0, 1"),
        ("threads", "threads that the plan was made with is 3 on rank 2, but 1 on ranks 0, 1"),
    ],
)
def test_a_plan_with_one_field_edited_is_refused(launch, tmp_path, plan, field, text):
    paths = save(tmp_path, plan, plan, edited(plan, field))
    for one in launch("agree", 3, paths=paths, how="load").end():
        assert one["error"] == "RankError"
        assert one["ranks"] == [2]
        assert text in one["sentence"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_corrupted_plan_on_one_rank_is_refused(launch, tmp_path, plan, ranks, damage):
    paths = save(tmp_path, *[plan] * ranks)
    last = Path(paths[-1])
    if damage == "gone":
        last.unlink()
    else:
        text = last.read_text()
        last.write_text(text[:-40] if damage == "cut" else text.replace("[1,1]", "[1,0]", 1))
    for one in launch("agree", ranks, paths=paths, how="load").end():
        assert one["error"] == "RankError"
        assert one["ranks"] == [ranks - 1]
        assert f"no rank starts, because of rank {ranks - 1}: " in one["sentence"]
        assert str(last) in one["sentence"]


def test_another_version_of_a_library_on_one_rank_is_refused(launch, tmp_path, plan):
    for one in launch(
        "agree", 2, paths=save(tmp_path, plan, plan), how="load", what="version"
    ).end():
        assert one["ranks"] == [1]
        assert "torch is 1.0 on rank 1, but 0 on rank 0" in one["sentence"]


def test_a_rank_that_has_no_plan_to_send_is_named(launch, tmp_path, plan):
    paths = save(tmp_path, plan)
    for one in launch("agree", 2, paths=paths, how="broadcast", what="none").end():
        assert one["ranks"] == [0]
        assert "it has no plan to send" in one["sentence"]


def test_the_minority_is_named_and_of_two_halves_the_one_without_the_first_rank():
    facts = [{"torch": version} for version in ("2", "1", "1", "1")]
    with pytest.raises(RankError, match="torch is 2 on rank 0, but 1 on ranks 1, 2, 3") as caught:
        require_equal(dict(enumerate(facts)))
    assert caught.value.ranks == (0,)
    with pytest.raises(RankError, match="torch is 1 on rank 1"):
        require_equal(dict(enumerate(facts[:2])))
    require_equal(dict(enumerate(facts[1:])))
