#!/usr/bin/env python3
"""Check that package and tests are no larger than .ci/size.json allows.

With --lower, write the numbers that are smaller now into .ci/size.json.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / ".ci" / "size.json"
# ucudnn/solvers and ucudnn/cache are links, which rglob does not follow.
PACKAGE = ("ucudnn", "solvers", "cache")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sizes(root: Path) -> dict[str, int]:
    """Modules, lines and lines of code of the package, and lines of its tests."""
    package = [file.read_text() for one in PACKAGE for file in (root / one).rglob("*.py")]
    tests = [file.read_text() for file in (root / "tests").rglob("*.py")]
    return {
        "modules": len(package),
        "lines": sum(map(_lines, package)),
        "code_lines": sum(map(_code_lines, package)),
        "test_lines": sum(map(_lines, tests)),
    }


def _lines(text: str) -> int:
    return len(text.splitlines())


def _code_lines(text: str) -> int:
    """Lines that are not blank and hold more than a comment or a docstring."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE and token.type != tokenize.ENDMARKER:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            found.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(found)


def main() -> str | None:
    """Compare, and say what is too large."""
    limits: dict[str, int] = json.loads(LIMITS.read_text())
    now = sizes(ROOT)
    if "--lower" in sys.argv[1:]:
        lowered = {name: min(limit, now[name]) for name, limit in limits.items()}
        LIMITS.write_text(json.dumps(lowered, indent=2) + "\n")
        return None
    too_large = [
        f"{name.replace('_', ' ')}: {now[name]:,}, and .ci/size.json allows {limit:,}"
        for name, limit in limits.items()
        if now[name] > limit
    ]
    if too_large:
        return (
            f"{'; '.join(too_large)}. Delete something, or raise the number together with a line "
            f"in CHANGELOG.md that says what users get for it"
        )
    print(", ".join(f"{name.replace('_', ' ')} {now[name]:,}" for name in limits))
    return None


if __name__ == "__main__":
    sys.exit(main())
