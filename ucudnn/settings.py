"""Values of settings: each checked by itself, and those that exclude each other. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ucudnn.errors import ConfigError
from ucudnn.units import TOO_LARGE

_BYTES_PER_UNIT = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_BYTES_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: int | str, name: str = "size") -> int:
    """Read a number of bytes as a person writes it.

    >>> parse_bytes("64MiB")
    67108864
    >>> parse_bytes("1.5 KiB")
    1536

    Args:
        text: an int (bytes) or a string with unit B, KiB, MiB or GiB (case does not matter).
        name: what the value is called in the error message.

    Raises:
        ConfigError: it is not a size, it is negative, or it is at least 2^63 bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool) and 0 <= text < TOO_LARGE:
        return text
    match = _BYTES_PATTERN.fullmatch(text) if isinstance(text, str) else None
    factor = _BYTES_PER_UNIT.get(match[2].upper()) if match else None
    # What is no size at all ends in the same error as a size that is too large.
    size = float(match[1]) * factor if match and factor else TOO_LARGE
    if size >= TOO_LARGE:
        decimal = match is not None and match[2].upper() in ("KB", "MB", "GB", "K", "M", "G")
        meant = f"; did you mean {match[1]}{match[2][0].upper()}iB?" if match and decimal else ""
        raise ConfigError(
            f"{name} must be a number of bytes such as 8388608, '64MiB' or '1.5GiB', got "
            f"{text!r}{meant}"
        )
    return int(size)


def size(name: str, value: Any) -> int | None:
    """A number of bytes, None for none."""
    return None if value is None else parse_bytes(value, name)


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """One of some names."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return str(value)


def switch(name: str, value: object, or_none: bool = False) -> bool | None:
    """True or False, also as text from the environment; None where that is allowed."""
    if or_none and value is None:
        return None
    # An environment variable is always text.
    texts = {"1": True, "true": True, "0": False, "false": False}
    found = texts.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        allowed = "True, False or None" if or_none else "True or False"
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")
    return found


def passes(value: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    """Passes, as names or as one text with commas."""
    ops = value.split(",") if isinstance(value, str) else value
    if not isinstance(ops, (tuple, list)) or not ops or any(op not in known for op in ops):
        raise ConfigError(f"ops must name some of {', '.join(known)}, got {value!r}")
    # Once each and in one order, so that equal settings are equal and plans hash alike.
    return tuple(op for op in known if op in ops)


def path(name: str, value: Any, what: str) -> str | None:
    """A path as text, None for none."""
    if value is not None and not isinstance(value, (str, Path)):
        raise ConfigError(f"{name} must be {what} or None, got {value!r}")
    return None if value is None else str(value)


def positive(name: str, value: object) -> float | None:
    """A number above 0, also as text from the environment; None stays None."""
    try:
        if value is None:
            return None
        # True is an int of 1 for Python; nan is refused, because it is not above 0.
        if isinstance(value, (int, float, str)) and value is not True and float(value) > 0:
            return float(value)
    except (ValueError, OverflowError):  # no number, or an int beyond the range of a float
        pass
    raise ConfigError(f"{name} must be a number above 0 or None, got {value!r}")


Values = Mapping[str, Any]


def conflict(values: Values, known_passes: tuple[str, ...]) -> str:
    """Reason why settings that are right by themselves exclude each other, "" if they do not.

    Args:
        values: of all settings, by name.
        known_passes: all passes of a training step.
    """
    every = ",".join(known_passes)
    given = {**values, "is_step": values["ops"] in (known_passes, ("fprop",))}
    said = (sentence for excludes, sentence in _CONFLICTS if excludes(given))
    return next(said, "").format(ops=",".join(values["ops"]), every=every)


def _has_pool(values: Values) -> bool:
    return values["total_workspace"] is not None


def _has_budget(values: Values) -> bool:
    return values["memory_budget"] is not None


# Looked at in this order.
_CONFLICTS: tuple[tuple[Callable[[Values], bool], str], ...] = (
    (
        lambda values: _has_budget(values) and _has_pool(values),
        (
            "memory_budget is of convolutions that share their workspace, and total_workspace of "
            "calls that each own a part; set one of them"
        ),
    ),
    (
        # What no plan covers takes as much workspace as torch likes.
        lambda values: _has_budget(values) and not values["is_step"],
        (
            "memory_budget needs a plan for every pass: ops must be {every}, or fprop for "
            "inference, got {ops}"
        ),
    ),
)
