"""Files that a person keeps: written whole or not at all, and read with care."""

from __future__ import annotations

import json
import os
import re
from itertools import accumulate
from pathlib import Path
from typing import Any
from uuid import uuid4

from ucudnn.errors import PlanError

# Every JSON document of ours has fewer levels; Python's recursion limit allows many more.
_DEEPEST = 32
_LEVELS = {"[": 1, "{": 1, "]": -1, "}": -1}
# A string, which may lack its end, or a run of characters outside of strings and brackets.
_NO_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[^"\[\]{}]+', re.DOTALL)


def write(path: str | os.PathLike[str], content: bytes, what: str) -> None:
    """Write a whole file, in place of the one that is there.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "plan.json"
    >>> write(path, b"{}", "the plan")
    >>> path.read_bytes()
    b'{}'

    Args:
        path: where to.
        content: all of it.
        what: it is called in errors.

    Raises:
        PlanError: the file cannot be written; what was there still is.
    """
    target = Path(path)
    # beside the target, because a rename is atomic only within a file system
    temporary = target.parent / f".{target.name}.{uuid4().hex}"
    try:
        try:
            with temporary.open("xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise PlanError(
            f"cannot write {what} to {target}: {error.strerror}; choose another path"
        ) from error


def parse_json(text: str) -> Any:
    """Read JSON that anybody may have written.

    >>> parse_json('{"a": ["[[["]}')
    {'a': ['[[[']}

    Raises:
        ValueError: it is not valid JSON, or has more than 32 levels: reading or writing deeper ones
            would exhaust Python's stack.
    """
    brackets = _NO_BRACKET.sub("", text)
    if max(accumulate(map(_LEVELS.__getitem__, brackets)), default=0) > _DEEPEST:
        raise ValueError(f"its brackets are nested deeper than {_DEEPEST} levels")
    return json.loads(text)
