"""docs/cache.md: its examples run."""

from __future__ import annotations

import doctest
from pathlib import Path


def test_the_examples_run(repository: Path) -> None:
    path = repository / "docs" / "cache.md"
    results = doctest.testfile(str(path), module_relative=False)
    assert results.attempted > 5
    assert results.failed == 0
