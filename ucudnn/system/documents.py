"""The JSON document of a plan: its text, its checksum and its version."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import ValidationError

from ucudnn.errors import PlanFileError, UcudnnError, shortened
from ucudnn.system.files import parse_json

FORMAT = "ucudnn-plan"
VERSION = 1


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the document of a plan's file.

    Raises:
        PlanFileError: it cannot be read, is not a plan, or is of another version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlanFileError(f"cannot read the plan {path}: {reason}") from error
    try:
        document = parse_json(text)
    except ValueError as error:
        raise PlanFileError(f"{path} is not a plan: it is not valid JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanFileError(f"{path} is not a plan: it has no field format={FORMAT!r}")
    version = document.get("version")
    if version != VERSION:
        raise PlanFileError(
            f"{path} is a plan of format version {shortened(repr(version))}, this ucudnn reads "
            f"{VERSION}; make it anew with `ucudnn tune` or use the ucudnn that wrote it"
        )
    return document


@contextmanager
def damage_named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context in which errors of a file's values become one error that names the file.

    Raises:
        PlanFileError: the values are not those of a plan.
    """
    try:
        yield
    # A file that was cut or edited may raise any of these while its values are built.
    except (KeyError, TypeError, ValueError, ValidationError, UcudnnError) as error:
        detail = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise PlanFileError(
            f"{path} is a damaged plan: {shortened(detail)}; make it anew"
        ) from error


def sha256_of(value: Any) -> str:
    """SHA-256 of a JSON value, as hexadecimal digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def canonical(value: Any) -> str:
    """Canonical JSON text: equal values have equal texts, on which hash and checksum rely.

    >>> canonical({"b": 1, "a": [2, 3]})
    '{"a":[2,3],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def in_lines(document: Mapping[str, Any]) -> str:
    """Canonical JSON text with a line for each field and each kernel, so that diffs tell them.

    >>> print(in_lines({"version": 1, "kernels": [{"b": 1, "a": 2}, {"a": 3}]}))
    {"kernels":[
    {"a":2,"b":1},
    {"a":3}],
    "version":1}
    """
    fields = []
    for name, value in sorted(document.items()):
        text = canonical(value)
        if name == "kernels":
            text = "[\n" + ",\n".join(map(canonical, value)) + "]"
        fields.append(f"{canonical(name)}:{text}")
    return "{" + ",\n".join(fields) + "}"
