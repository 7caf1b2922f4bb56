"""Scripts of benchmarks/ as modules: they are no package and import each other by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A function that imports a script by its name."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module
