"""The documentation site: its menu, the pages that are made, and the check of its links."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import pytest
import typer.main

import ucudnn
from ucudnn import cli, errors, types


@pytest.fixture
def pages(script):
    """The script that makes pages."""
    return script("site_pages")


def test_the_menu_has_every_page_once(pages, repository):
    listed = re.findall(r"^ +- [^:]+: (\S+\.md)$", (repository / "mkdocs.yml").read_text(), re.M)
    docs = repository / "docs"
    kept = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    assert sorted(listed) == sorted([*kept, *pages.pages()])


def test_the_reference_has_every_public_name(pages):
    assert pages.public_names("ucudnn") == list(dict.fromkeys(pages.public_names("ucudnn")))
    assert set(pages.public_names("ucudnn")) == set(ucudnn.__all__)
    assert set(pages.public_names("ucudnn.types")) == {
        name for name in dir(types) if not name.startswith("_")
    }
    own = inspect.getmembers(errors, inspect.isclass)
    assert set(pages.public_names("ucudnn.errors")) == {
        name for name, one in own if one.__module__ == errors.__name__
    }
    distributed = pytest.importorskip("ucudnn.distributed")
    assert set(pages.public_names("ucudnn.distributed")) == set(distributed.__all__)
    assert "::: ucudnn.Plan\n" in pages.pages()["api/ucudnn.md"]


def test_the_command_line_has_every_command_and_flag(pages):
    page = pages.command_line()
    sections = dict(re.findall(r"^## ([\w -]+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))

    def look(command: object, path: str) -> int:
        for parameter in command.params:
            assert all(flag in sections[path] for flag in parameter.opts if flag[0] == "-"), path
        children = getattr(command, "commands", {})
        return 1 + sum(look(child, f"{path} {name}") for name, child in children.items())

    count = look(typer.main.get_command(cli.app), "ucudnn")
    assert count == len(sections) >= 20


def test_the_citation_names_this_version(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert f"Version {project['version']}" in (repository / "docs" / "project.md").read_text()
