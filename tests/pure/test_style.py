"""Style: what the linter cannot see - what belongs to one module, what no file may hold."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

# The machine that made the file, and the hosts that packages come from.
FOREIGN = re.compile(
    r"(?<![\w.$})-])/(?:work|root|opt|home)/\w|pypi\.(?:org|python)|pythonhosted\.|index-url[ =]"
)


def modules(folder: Path) -> Iterator[tuple[str, str, ast.Module]]:
    """Name, text and syntax tree of every module, also behind the links to solvers and cache."""
    for parent, _, files in os.walk(folder, followlinks=True):
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(parent, file)
                text = path.read_text()
                yield str(path.relative_to(folder)), text, ast.parse(text)


def test_every_module_says_why_it_exists(repository: Path) -> None:
    for folder in (repository / "tests", repository / "examples"):
        assert not [name for name, _, tree in modules(folder) if not ast.get_docstring(tree)]


def test_one_module_reads_our_environment_variables(package: Path) -> None:
    for name, _, tree in modules(package):
        variables = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and re.fullmatch(r"UCUDNN_\w+", str(node.value))
        ]
        assert not variables or name == "config.py", (name, variables)


def test_no_file_names_a_machine(repository: Path) -> None:
    found = [
        f"{path.relative_to(repository)}:{number}: {line.strip()[:80]}"
        for path in kept_files(repository)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if FOREIGN.search(line)
    ]
    assert not found


def kept_files(repository: Path) -> list[Path]:
    """Files that are in the repository, or would be with the next commit."""
    if not (repository / ".git").exists():
        pytest.skip("not a git checkout")
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others"]
    listing = subprocess.run(
        [*git, "--exclude-standard"], check=True, capture_output=True, cwd=repository, text=True
    ).stdout
    paths = [repository / name for name in listing.split("\0") if name]
    return [path for path in paths if path.is_file()]
