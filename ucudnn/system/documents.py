"""The JSON document of a plan: its text, its checksum, its version and the types of its values."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ucudnn.errors import PlanError, PlanFileError, UcudnnError, shortened
from ucudnn.system.files import parse_json
from ucudnn.units import TOO_LARGE

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
    except (KeyError, TypeError, AttributeError, ValueError, UcudnnError) as error:
        detail = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise PlanFileError(
            f"{path} is a damaged plan: {shortened(detail)}; make it anew"
        ) from error


def require_checksum(document: Mapping[str, Any]) -> None:
    """Refuse a document that differs from what was written.

    Raises:
        PlanFileError: its checksum is wrong.
    """
    rest = {name: value for name, value in document.items() if name != "checksum"}
    if document["checksum"] != sha256_of(rest):
        raise PlanFileError("its checksum does not agree with its contents")


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


def pairs_in(rows: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    """Pairs of a JSON list as tuples.

    >>> pairs_in([[4, 0]])
    ((4, 0),)
    """
    return tuple((size, index) for size, index in rows)


def strings_in(values: object) -> tuple[str, ...]:
    """A JSON list of names as a tuple.

    Raises:
        PlanError: it is no list.
    """
    # `tuple` would take a string apart into its characters.
    if not isinstance(values, list):
        raise PlanError(f"names must be a list, got {values!r}")
    return tuple(values)


def require_bool(name: str, value: object) -> None:
    """Refuse what is neither true nor false.

    Raises:
        PlanError: it is not.
    """
    if not isinstance(value, bool):
        raise PlanError(f"{name} must be true or false, got {value!r}")


def require_count(name: str, value: object) -> None:
    """Refuse what is no int from 0 to 2^63 - 1.

    Raises:
        PlanError: it is not.
    """
    if type(value) is not int or not 0 <= value < TOO_LARGE:
        raise PlanError(f"{name} must be an int from 0 to 2^63 - 1, got {value!r}")


def require_ints(name: str, rows: Iterable[Iterable[int]]) -> None:
    """Refuse rows that hold anything but ints.

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
        PlanError: one is not.
    """
    for value in values:
        if not isinstance(value, str):
            raise PlanError(f"{name} must hold strings, got {value!r}")


def require_slabs(
    problem: object, rows: int, slabs: Sequence[tuple[int, int]], indices: range
) -> None:
    """Refuse slabs of a kernel's plan that are not all of its rows.

    Args:
        problem: the kernel at its largest batch.
        rows: number of rows that slabs divide.
        slabs: (rows, algorithm index) of each.
        indices: those of algorithms.

    Raises:
        PlanError: they are.
    """
    named = all(size > 0 and index in indices for size, index in slabs)
    if not named or sum(size for size, _ in slabs) != rows:
        raise PlanError(
            f"the plan of {problem} must have slabs of {rows} rows altogether, got {slabs}"
        )


def require_chains(
    problem: object, alone: Iterable[int], last: Iterable[tuple[int, int]], indices: range
) -> None:
    """Refuse tables of a kernel's plan that lead to no algorithm or to no end.

    Args:
        problem: the kernel at its largest batch.
        alone: as in `KernelPlan`.
        last: as in `KernelPlan`, with as many entries.
        indices: all that `alone` may hold; those of algorithms begin at 0.

    Raises:
        PlanError: an entry is wrong.
    """
    # Batches from which a walk along `last` ends at 0, so that `KernelPlan.split` always ends.
    reachable = {0}
    for n, (index, (size, step_index)) in enumerate(zip(alone, last, strict=True), start=1):
        if index not in indices:
            raise PlanError(f"the plan of {problem} names no algorithm for batch {n}")
        if size == 0:
            continue
        is_named = 0 <= step_index < indices.stop
        if not (0 < size <= n and n - size in reachable and is_named):
            raise PlanError(f"the plan of {problem} has no valid split of batch {n}")
        reachable.add(n)
