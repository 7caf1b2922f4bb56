"""Files that a person keeps: a reader sees the old one or the new one, never half."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

from ucudnn.errors import PlanError


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
