"""`benchmarks/peers.py`: which rivals a plan meets, and what was predicted right."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def peers(script: Any) -> ModuleType:
    """The script."""
    found: ModuleType = script("peers")
    return found


def row(peak: int, *step_ns: int, predicted: tuple[int, float] = (100, 1.0)) -> dict[str, Any]:
    """A way by torch as it is written down."""
    said = {"peak_bytes": predicted[0], "ratio": predicted[1]}
    return {"peak_bytes": peak, "step_ns": step_ns, "predicted": said, "gradient_norm": 2.0}


def test_a_plan_meets_only_ways_that_no_other_beats(peers: ModuleType) -> None:
    rows = {
        "eager": row(100, 10, 11, 12),
        "slower in the same memory": row(100, 20, 20, 20),
        "less": row(60, 14, 14, 13),
        "more and slower than less": row(70, 15, 15, 15),
        "about as fast, in less": row(59, 14, 14, 14),
        "least": row(20, 30, 30, 30),
        "faster, with other gradients": row(20, 10, 10, 10) | {"gradient_norm": 1.5},
    }
    assert peers.front(rows) == ["eager", "about as fast, in less", "least"]


def test_hits_and_misses_are_counted(peers: ModuleType, tmp_path: Any) -> None:
    book = peers.Book("segresnet", peers.CASES["segresnet"], tmp_path / "peers.json")
    book.found["ways"] = {
        "eager": row(100, 10, 10, 10),
        "hit": row(50, 15, 15, 15, predicted=(51, 1.6)),
        "miss": row(50, 15, 15, 15, predicted=(60, 1.0)),
    }
    faster = {"predicted": {"peak_bytes": 50, "is_faster": True}}
    book.found["plans"] = {"hit": faster, "miss": {"refused": "too small"}}
    book.found["race"] = {
        "hit": {"samples_ns": [15, 15, 15], "peak_bytes": 50},
        "plan at the peak of hit": {"samples_ns": [12, 16, 12], "peak_bytes": 49},
    }
    assert peers.judged(book) == [
        "peaks of torch's ways: 2 of 3 within 3%",
        "times of torch's ways: 1 of 2 within 10%",
        "peaks of plans: 1 of 1 within 3%",
        "winners: 1 of 1 right; plans are faster in 1",
    ]
    book.write()
    # What is written is read by the next start.
    again = peers.Book("segresnet", peers.CASES["segresnet"], tmp_path / "peers.json")
    assert json.dumps(again.found) == json.dumps(book.found)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_small_network_by_every_way(
    peers: ModuleType, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("monai", reason="the extra `test` brings it")
    out = tmp_path / "peers.json"
    words = ["peers.py", "segresnet", "--shape", "2,1,16,16,16", "--budgets", "0.5"]
    words += ["--rounds", "1", "--time-budget-s", "5", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    peers.main()
    (found,) = json.loads(out.read_text())
    # The whole model is one graph.
    assert len(found["ways"]["torch.compile, budget 0.5"]["graphs"]) == 1
    assert all("predicted" in one for one in found["ways"].values())
    norms = [one["gradient_norm"] for one in found["ways"].values()]
    assert max(norms) == pytest.approx(min(norms), rel=1e-3)
    assert found["race"]["eager"]["samples_ns"]
    assert len(found["predictions"]) == 4
