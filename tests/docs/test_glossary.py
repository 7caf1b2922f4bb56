"""docs/glossary.md: every term is used, in the order of the alphabet, and defined once."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest


def terms(repository: Path) -> list[str]:
    text = (repository / "docs" / "glossary.md").read_text()
    return re.findall(r"^\| (?!term |---)([^|]+?) \| [^|]+ \|$", text, re.M)


@pytest.fixture(scope="module")
def everything(repository: Path, package: Path) -> str:
    """The package and the other documents, in small letters, names taken apart."""
    documents = [*repository.glob("*.md"), *(repository / "docs").glob("*.md")]
    sources = [
        Path(folder, file)
        for folder, _, files in os.walk(package, followlinks=True)
        for file in files
        if file.endswith(".py")
    ]
    text = "\n".join(
        path.read_text() for path in [*documents, *sources] if path.name != "glossary.md"
    )
    return re.sub(r"[\s_]+", " ", text.lower())


def test_every_term_is_used(repository: Path, everything: str) -> None:
    found = terms(repository)
    assert len(found) > 40
    assert [term for term in found if not re.search(rf"\b{re.escape(term)}", everything)] == []


def test_terms_are_in_order_and_defined_once(repository: Path) -> None:
    found = terms(repository)
    assert found == sorted(set(found))


def test_meanings_are_phrases(repository: Path) -> None:
    """Each row is one line, and a meaning has no full stop."""
    text = (repository / "docs" / "glossary.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(terms(repository))
    assert not [row for row in rows if row.endswith(". |")]
