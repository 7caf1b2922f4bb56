"""docs/cache.md: its examples run, and its table of commands names what there is."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path

from ucudnn.cache import commands


def test_the_examples_run(repository: Path) -> None:
    path = repository / "docs" / "cache.md"
    results = doctest.testfile(str(path), module_relative=False)
    assert results.attempted > 5
    assert results.failed == 0


def test_every_command_is_listed_with_its_arguments(repository: Path) -> None:
    text = (repository / "docs" / "cache.md").read_text()
    listed = dict(re.findall(r"^\| `ucudnn cache \w+` \| `(\w+)\(([^)]*)\)`", text, re.M))
    functions = {
        name: function
        for name, function in vars(commands).items()
        if inspect.isfunction(function) and function.__module__ == commands.__name__
    }
    assert listed.keys() == functions.keys()
    for name, arguments in listed.items():
        assert arguments.split(", ") == list(inspect.signature(functions[name]).parameters)
