"""docs/architecture.md: its picture is what the source says, what it names is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest


@pytest.fixture
def drawing(script):
    """The script that draws the picture."""
    return script("make_architecture")


@pytest.mark.slow
def test_the_picture_is_that_of_the_source(drawing, repository, package):
    drawn = (repository / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert drawing.draw(package) == drawn, "python docs/make_architecture.py docs/architecture.svg"


def test_every_room_has_its_row(drawing, package):
    rooms = {
        path.stem
        for path in package.iterdir()
        if path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").exists())
    } - {"__init__"}
    listed = {room for row in drawing.layers() for room in row} - {drawing.VALUES}
    assert rooms == listed | set(drawing.values())


def test_what_it_names_is_there(repository: Path, package: Path) -> None:
    text = (repository / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w./]+(?:\.py|/))`", text)
    assert len(named) > 15
    for name in named:
        assert any((root / name).exists() for root in (repository, package)), name


def test_names_are_defined_in_their_rooms(repository: Path, package: Path) -> None:
    text = (repository / "docs" / "architecture.md").read_text()
    table = text.partition("## Where would I change")[2].partition("## Where state")[0]
    count = 0
    for row in re.findall(r"^\| (?!what|---|\*\*).* \| (.+) \|$", table, re.M):
        source = ""
        for code in re.findall(r"`([^`]+)`", row):
            if code.endswith(("/", ".py")):
                source = source_of(repository / code, package / code)
            else:
                defined = rf"^ *(class|def) {code}\b|^{code}(:.*)? = "
                assert re.search(defined, source, re.M), f"{code}: {row}"
                count += 1
    assert count > 40


def source_of(*paths: Path) -> str:
    """Text of all modules under the path that exists."""
    path = next(path for path in paths if path.exists())
    modules = [path] if path.is_file() else path.rglob("*.py")
    return "\n".join(module.read_text() for module in modules)


def test_the_coverage_gates_know_every_value(drawing, repository):
    settings = tomllib.loads((repository / "pyproject.toml").read_text())
    included = settings["tool"]["coverage"]["run"]["include"]
    gated = {re.sub(r"^\*/ucudnn/|(/\*|\.py)$", "", pattern) for pattern in included}
    nightly = re.search(r"^STEPS := (.*)", (repository / "Makefile").read_text(), re.M)
    wanted = {*drawing.values(), "cache", "solvers", "kernels", "steps"}
    assert sorted([*gated, *nightly[1].split()]) == sorted(wanted)
