"""docs/distributed.md: its code compiles, and calls what exists with arguments that exist."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from ucudnn import distributed


def test_the_code_in_the_document_calls_what_exists(repository: Path) -> None:
    text = (repository / "docs" / "distributed.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    called = set()
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("distributed."):
                name = ast.unparse(node.func).removeprefix("distributed.")
                keywords = {keyword.arg: None for keyword in node.keywords}
                inspect.signature(getattr(distributed, name)).bind(*node.args, **keywords)
                called.add(name)
    assert "tune" in called


def test_the_document_names_every_function(repository: Path) -> None:
    text = (repository / "docs" / "distributed.md").read_text()
    for name in distributed.__all__:
        assert name in text
