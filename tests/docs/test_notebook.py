"""The notebook of examples/: it runs from top to bottom, and is kept without results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def cells(repository: Path) -> list[dict]:
    notebook = json.loads((repository / "examples" / "plan.ipynb").read_text())
    assert notebook["nbformat"] == 4
    return notebook["cells"]


def test_it_is_kept_without_results(cells: list[dict]) -> None:
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in cells}) == len(cells)


@pytest.mark.nightly
def test_it_runs(cells, python, tmp_path):
    pytest.importorskip("plotly", reason="charts need plotly (the extra report)")
    # One process runs the cells in their order, as a kernel does.
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    result = python("-c", code, cwd=tmp_path)
    assert "conv2d(3->16" in result.stdout
    assert "times as long" in result.stdout or "limit" in result.stdout
    made = {path.name for path in tmp_path.iterdir()}
    assert made >= {"net.plan.json", "plan_cache", "net.html"}
