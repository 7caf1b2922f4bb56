"""docs/distributed.md, communication.md: their code calls what exists, by arguments that exist."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from ucudnn import distributed


def test_the_code_in_the_documents_calls_what_exists(repository: Path) -> None:
    pages = [repository / "docs" / f"{name}.md" for name in ("distributed", "communication")]
    text = "".join(page.read_text() for page in pages)
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    called = set()
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("distributed."):
                name = ast.unparse(node.func).removeprefix("distributed.")
                keywords = {keyword.arg: None for keyword in node.keywords}
                inspect.signature(getattr(distributed, name)).bind(*node.args, **keywords)
                called.add(name)
    assert {"tune", "advise"} <= called


def test_the_document_names_every_function(repository: Path) -> None:
    text = (repository / "docs" / "distributed.md").read_text()
    for name in distributed.__all__:
        assert name in text
