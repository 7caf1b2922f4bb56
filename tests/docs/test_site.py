"""The documentation site: its menu, the pages that are made, and the check of its links."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import typer.main

import ucudnn
from ucudnn import cli, errors, types

Import = Callable[[str], ModuleType]


@pytest.fixture
def hook(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """A function that imports a script of docs/, without the packages that build the site."""

    def imported(name: str) -> ModuleType:
        monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))
        spec = importlib.util.spec_from_file_location(name, repository / "docs" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return imported


def test_the_menu_has_every_page_once(hook: Import, repository: Path) -> None:
    listed = re.findall(r"^ +- [^:]+: (\S+\.md)$", (repository / "mkdocs.yml").read_text(), re.M)
    docs = repository / "docs"
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    assert sorted(listed) == sorted([*pages, *hook("site_pages").pages()])


def test_the_reference_has_every_public_name(hook: Import) -> None:
    pages = hook("site_pages")
    assert pages.public_names("ucudnn") == list(dict.fromkeys(pages.public_names("ucudnn")))
    assert set(pages.public_names("ucudnn")) == set(ucudnn.__all__)
    assert set(pages.public_names("ucudnn.types")) == set(types.__all__)
    own = inspect.getmembers(errors, inspect.isclass)
    assert set(pages.public_names("ucudnn.errors")) == {
        name for name, one in own if one.__module__ == errors.__name__
    }
    distributed = pytest.importorskip("ucudnn.distributed")
    assert set(pages.public_names("ucudnn.distributed")) == set(distributed.__all__)
    assert "::: ucudnn.Plan\n" in pages.pages()["api/ucudnn.md"]


def test_the_command_line_has_every_command_and_flag(hook: Import) -> None:
    page = hook("site_pages").command_line()
    sections = dict(re.findall(r"^## ([\w -]+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))

    def look(command: object, path: str) -> int:
        for parameter in command.params:
            assert all(flag in sections[path] for flag in parameter.opts if flag[0] == "-"), path
        children = getattr(command, "commands", {})
        return 1 + sum(look(child, f"{path} {name}") for name, child in children.items())

    count = look(typer.main.get_command(cli.app), "ucudnn")
    assert count == len(sections) > 20


def test_the_citation_names_this_version(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert f"Version {project['version']}" in (repository / "docs" / "project.md").read_text()
