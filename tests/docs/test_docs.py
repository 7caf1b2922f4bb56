"""README.md and docs/: their code runs, their commands exist, their pictures are up to date."""

from __future__ import annotations

import doctest
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ucudnn import Config, cli

FENCE = re.compile(
    r"^(?P<mark><!-- runs -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
LINK = re.compile(r"\]\((?P<target>[^)#:\s]+)(?:#[^)]*)?\)")


@pytest.fixture(scope="session")
def readme(repository: Path) -> str:
    """README.md and the pages that have what does not fit there."""
    names = ("README.md", "docs/using.md", "docs/memory.md")
    paths = [repository / name for name in names]
    return "\n".join(path.read_text() for path in paths)


@pytest.fixture(scope="session")
def documents(repository: Path) -> str:
    """README.md and all pages."""
    paths = [repository / "README.md", *sorted((repository / "docs").rglob("*.md"))]
    return "\n".join(path.read_text() for path in paths)


def blocks(text: str, *languages: str) -> Iterator[re.Match[str]]:
    return (match for match in FENCE.finditer(text) if match["language"] in languages)


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of the application that does something, with the words that call it."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
    for name, child in (children or {}).items():
        yield from commands(child, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(cli.app)))


def test_every_python_block_compiles(readme: str) -> None:
    found = list(blocks(readme, "python"))
    assert len(found) > 3
    for block in found:
        compile(block["code"], "README.md", "exec")


@pytest.mark.nightly
def test_every_block_marked_as_running_runs(readme, python, tmp_path):
    """A line `<!-- runs -->` above a block marks it; each runs by itself in an empty folder."""
    for number, block in enumerate(blocks(readme, "python")):
        if block["mark"]:
            folder = tmp_path / str(number)
            folder.mkdir()
            python("-c", block["code"], cwd=folder)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_is_in_the_reference_and_its_help_has_an_example(
    path: tuple[str, ...], repository: Path
) -> None:
    reference = (repository / "docs" / "reference.md").read_text()
    assert f"`ucudnn {' '.join(path)}" in reference
    assert "Example" in (COMMANDS[path].help or "")


def test_every_setting_is_in_the_reference(repository: Path) -> None:
    reference = (repository / "docs" / "reference.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", reference, re.M)
    assert sorted(listed) == sorted(field.name for field in fields(Config))


def test_every_command_line_is_one_that_exists(documents: str) -> None:
    lines = [
        line
        for block in blocks(documents, "", "sh", "bash", "shell", "console")
        for line in block["code"].replace("\\\n", " ").splitlines()
        if re.match(r"(\$ )?(ucudnn|python -m ucudnn) ", line)
    ]
    assert lines
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        words = words[1:] if words[0] == "ucudnn" else words[3:]
        # What follows is of another program.
        words = words[: words.index("--")] if "--" in words else words
        path = max(
            (path for path in COMMANDS if tuple(words[: len(path)]) == path), key=len, default=None
        )
        assert path is not None, f"no such command: {line}"
        known = set(options(COMMANDS[path]))
        used = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
        assert used <= known, f"no such option: {line}"


def options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from parameter.opts
        yield from parameter.secondary_opts
    yield "--help"


@pytest.mark.parametrize("name", ["steps", "fit", "memory"])
def test_pictures_are_what_their_scripts_draw(repository, python, tmp_path, name):
    file = f"{'step_' * (name == 'memory')}{name}.svg"
    kept, drawn = repository / "docs" / file, tmp_path / file
    script = repository / "docs" / f"make_{name}.py"
    python(script, drawn, cwd=tmp_path)
    assert drawn.read_text() == kept.read_text(), f"python docs/make_{name}.py docs/{file}"


TABLES = {
    "docs/results.md": 14,
    "docs/memory.md": 0,
    "docs/communication.md": 1,
    "docs/reference.md": 1,
    "README.md": 1,
}


@pytest.mark.process
def test_tables_are_those_of_the_files_and_of_the_settings(repository, python, tmp_path):
    made = {name: tmp_path / f"{number}.md" for number, name in enumerate(TABLES)}
    for name, path in made.items():
        path.write_bytes((repository / name).read_bytes())
    python(repository / "docs" / "make_tables.py", *made.values(), cwd=tmp_path)
    for name, path in made.items():
        assert path.read_text().count("<!-- end of table -->") == TABLES[name]
        kept = (repository / name).read_text()
        assert path.read_text() == kept, f"python docs/make_tables.py {name}"


def test_links_lead_to_files(checkout: Path) -> None:
    documents = [*checkout.glob("*.md"), *checkout.glob("*/*.md")]
    for document in [*documents, *checkout.glob("docs/*/*.md")]:
        for link in LINK.finditer(document.read_text()):
            target = document.parent / link["target"]
            assert target.exists(), f"{document.name}: {link['target']}"


def test_every_term_of_the_glossary_is_used_and_defined_once(
    repository: Path, package: Path
) -> None:
    glossary = repository / "docs" / "glossary.md"
    terms = re.findall(r"^\| (?!term |---)([^|]+?) \| [^|]+ \|$", glossary.read_text(), re.M)
    assert len(terms) > 40
    assert terms == sorted(set(terms), key=str.lower)
    texts = [*repository.glob("*.md"), *(repository / "docs").glob("*.md")]
    texts += [
        Path(folder, file)
        for folder, _, files in os.walk(package, followlinks=True)
        for file in files
        if file.endswith(".py")
    ]
    everything = "\n".join(path.read_text() for path in texts if path != glossary)
    plain = re.sub(r"[\s_]+", " ", everything.lower())
    assert [term for term in terms if not re.search(rf"\b{re.escape(term.lower())}", plain)] == []


def test_the_examples_of_solvers_give_what_their_comments_say(repository: Path) -> None:
    text = (repository / "docs" / "solvers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    exec("from ucudnn.plan import Chunk", names)
    for line in "".join(blocks).splitlines():
        code, _, said = line.partition("  # ")
        if said:
            expected = said.removesuffix(": bytes, ns")
            assert eval(code, names) == eval(expected, names), line
        else:
            exec(code, names)


def test_the_examples_of_the_cache_run(repository: Path) -> None:
    results = doctest.testfile(str(repository / "docs" / "formats.md"), module_relative=False)
    assert results.attempted > 5
    assert results.failed == 0
