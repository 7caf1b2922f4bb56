"""docs/quickstart.md and docs/howto/: what a reader would do with each page, in its order.

Comments in a page mark what happens to the block below: `<!-- file: NAME -->` saves it, and
`<!-- runs -->` runs it, Python and shell alike. All blocks of a page share one folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "quickstart.md", *sorted((DOCS / "howto").glob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>runs|file: (?P<name>\S+)) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.M | re.S,
)


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text("utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_all_python_of_a_page_is_run_or_saved(page: Path) -> None:
    marked = [block for block in blocks(page) if block["mark"]]
    assert all(block["mark"] for block in blocks(page) if block["language"] == "python")
    assert any(block["mark"] == "runs" for block in marked)
    # A misspelt mark would only be a comment.
    assert len(marked) == page.read_text("utf-8").count("<!--")


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_in_their_order(page: Path, package: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        # `python`, `ucudnn` and `torchrun` are those of the package under test.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{package.parent}{os.pathsep}{tmp_path}",
        "OMP_NUM_THREADS": "1",
        # Pages tune by the defaults. Here a small search is enough, and no plan may be partial
        # because the machine was busy.
        "UCUDNN_EFFORT": "quick",
        "UCUDNN_TIME_BUDGET_S": "600",
    }
    options = {"cwd": tmp_path, "env": environment, "text": True}
    run = partial(subprocess.run, check=False, capture_output=True, **options)
    for block in blocks(page):
        if block["name"]:
            (tmp_path / block["name"]).write_text(block["code"], "utf-8")
        elif block["mark"]:
            command = {"python": [sys.executable, "-c"], "sh": ["bash", "-euc"]}[block["language"]]
            result = run([*command, block["code"]])
            # Of torch's ranks on gloo one sometimes aborts at exit (pytorch#179291).
            if result.returncode and "terminate called without an active" in result.stderr:
                result = run([*command, block["code"]])
            missing = re.search(r"ModuleNotFoundError: No module named '(\w+)'", result.stderr)
            if missing and find_spec(missing[1]) is None:
                pytest.skip(f"the extra `test` brings {missing[1]}")
            output = f"{result.stdout}\n{result.stderr}"
            assert result.returncode == 0, f"{page.name}\n{block['code']}\n{output}"


def test_figures_are_those_of_the_measurements() -> None:
    """The page for beginners quotes figures; each is in a page that has the measurements."""
    figure = re.compile(r"\b\d+\.\d+\b|\b\d+ of \d+\b|\b\d+ %")
    sources = [DOCS / "results.md", DOCS / "memory.md", DOCS / "gpu-status.md"]
    measured = "\n".join(path.read_text("utf-8") for path in sources)
    quoted = set(figure.findall((DOCS / "will-it-help.md").read_text("utf-8")))
    assert quoted
    assert [one for one in quoted if one not in measured] == []
