"""The JSON document of a plan: its text, its checksum and its version."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ucudnn.errors import PlanError, PlanFileError, shortened
from ucudnn.system.files import parse_json
from ucudnn.units import TOO_LARGE

FORMAT = "ucudnn-plan"
# A plan is written in the first version that can hold it: 2 has slabs, 3 a memory format.
VERSIONS = (1, 2, 3)


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the document of a plan's file.

    Raises:
        PlanFileError: it cannot be read, is not a plan, or is of a later version.
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
    if version not in VERSIONS:
        raise PlanFileError(
            f"{path} is a plan of format version {shortened(repr(version))}, "
            f"this ucudnn reads {VERSIONS[0]} to {VERSIONS[-1]}; "
            f"make it anew with `ucudnn tune` or use the ucudnn that wrote it"
        )
    return document


def require_checksum(document: Mapping[str, Any]) -> None:
    """Refuse a document that is not what was written.

    Raises:
        PlanFileError: its checksum says so.
    """
    rest = {name: value for name, value in document.items() if name != "checksum"}
    if document["checksum"] != sha256_of(rest):
        raise PlanFileError("its checksum does not agree with its contents")


def sha256_of(value: Any) -> str:
    """SHA-256 of a JSON value, as hexadecimal digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def canonical(value: Any) -> str:
    """One text for equal values, whoever writes them: hash and checksum depend on it.

    >>> canonical({"b": 1, "a": [2, 3]})
    '{"a":[2,3],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def require_count(name: str, value: object) -> None:
    """Refuse what is no 64-bit int of at least 0.

    Raises:
        PlanError: it is none.
    """
    if type(value) is not int or not 0 <= value < TOO_LARGE:
        raise PlanError(f"{name} must be an int from 0 to 2^63 - 1, got {value!r}")


def require_ints(name: str, rows: Iterable[Iterable[int]]) -> None:
    """Refuse rows that hold something else than ints.

    Raises:
        PlanError: they do.
    """
    for row in rows:
        for value in row:
            # a float or a bool that equals an int would pass comparisons and fail as an index
            if type(value) is not int:
                raise PlanError(f"{name} must hold ints, got {value!r}")


def require_strings(name: str, values: Iterable[str]) -> None:
    """Refuse values that are no strings.

    Raises:
        PlanError: one is none.
    """
    for value in values:
        if not isinstance(value, str):
            raise PlanError(f"{name} must hold strings, got {value!r}")
