"""docs/architecture.md: its picture is what the source says, its files are there."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def script(repository: Path) -> ModuleType:
    """The script that draws the picture."""
    path = repository / "docs" / "make_architecture.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_picture_is_that_of_the_source(
    script: ModuleType, repository: Path, package: Path
) -> None:
    drawn = (repository / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert script.draw(package) == drawn, "python docs/make_architecture.py docs/architecture.svg"


def test_every_room_has_its_row(script: ModuleType, package: Path) -> None:
    rooms = {
        path.stem
        for path in package.iterdir()
        if path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").exists())
    } - {"__init__"}
    listed = {room for row in script.layers() for room in row} - {script.VALUES}
    assert rooms == listed | set(script.values())


def test_what_it_names_is_there(repository: Path, package: Path) -> None:
    text = (repository / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w./]+(?:\.py|/))`", text)
    assert len(named) > 15
    for name in named:
        assert any((root / name).exists() for root in (repository, package)), name


def test_the_coverage_gate_knows_every_value(script: ModuleType, repository: Path) -> None:
    settings = tomllib.loads((repository / "pyproject.toml").read_text())
    included = settings["tool"]["coverage"]["report"]["include"]
    gated = {re.sub(r"^\*/ucudnn/|(/\*|\.py)$", "", pattern) for pattern in included}
    assert gated == {*script.values(), "cache", "solvers", "tuning"}
