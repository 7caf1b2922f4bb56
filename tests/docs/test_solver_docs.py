"""What docs/solvers.md shows is what runs."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_example_runs_and_gives_what_its_comments_say(repository: Path) -> None:
    text = (repository / "docs" / "solvers.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    names: dict[str, object] = {}
    exec("from ucudnn.plan import Step", names)
    for line in block.splitlines():
        code, _, said = line.partition("  # ")
        if said:
            expected = said.removesuffix(": bytes, ns")
            assert eval(code, names) == eval(expected, names), line
        else:
            exec(code, names)
