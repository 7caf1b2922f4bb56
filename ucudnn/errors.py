"""Errors and warnings; each message is a sentence with the rule, the value and the remedy.

`UcudnnError` is the base class of errors, and `UcudnnWarning` is the base class of warnings.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any


def shortened(sentence: str, longest: int = 300) -> str:
    """Cut the middle out of a text if it is too long, such as a text from a damaged file.

    >>> len(shortened("got " + "9" * 5000)), shortened("got 9")
    (300, 'got 9')
    """
    if len(sentence) <= longest:
        return sentence
    # Both ends of the text are kept, so that it can be recognised. The dots between them, with a
    # blank on each side, take 5 characters.
    half = (longest - 5) // 2
    return f"{sentence[: half + 1]} ... {sentence[-half:]}"


def quoted(value: object) -> str:
    """A value as a message quotes it: on one line, without its middle if it is long.

    >>> quoted("64MB"), quoted(10**9999)
    ("'64MB'", 'an int of 33216 bits')
    """
    # Python refuses to write an int of more than 4300 digits as text.
    if isinstance(value, int) and value.bit_length() > 9999:
        return f"an int of {value.bit_length()} bits"
    return shortened(" ".join(repr(value).split()), 120)


def first_line(error: BaseException) -> str:
    """The first line of an error, or its class if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class UcudnnError(Exception):
    """Base of every error that ucudnn raises on purpose."""


class ProblemError(UcudnnError, ValueError):
    """A convolution that cannot exist: the message names the field, its value and the rule."""


class ConfigError(UcudnnError, ValueError):
    """A setting, flag, input, file or environment variable that is not what it must be."""


class UnsupportedError(UcudnnError):
    """A valid problem that this backend or this algorithm cannot compute."""


# Two base classes, because tuning expects an UnsupportedError if a candidate cannot run, and code
# that calls torch's operators expects a RuntimeError.
class RefusedError(UnsupportedError, RuntimeError):
    """An algorithm's first run has shown that it does not compute these operands."""


class BusyError(UcudnnError):
    """Nothing can be measured now, for a temporary reason; no failure is written to the cache."""


class CacheError(UcudnnError):
    """A measurement cache that cannot be read or written."""


class PlanError(UcudnnError):
    """No plan fits the limits, or a plan does not belong to this model or device.

    Attributes:
        smallest_bytes: the smallest workspace limit in bytes with which a plan exists; None if
            there is no such limit, or if the error is not about limits.
        lacks_memory: True if there was too little memory to run all that might make a plan.
    """

    lacks_memory = False

    def __init__(self, message: str, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class PlanFileError(PlanError):
    """A file that cannot be read as a plan: missing, not a plan, damaged, or of another version."""


class OutputError(PlanError):
    """A file that cannot be written; an older file of the same name stays as it was."""


class TableError(CacheError):
    """A file or folder that cannot be read as measurements, or to which they cannot be written."""


class RankError(UcudnnError):
    """Ranks of one job that do not agree, or do not answer; the message names them.

    Attributes:
        ranks: numbers of the named ranks in the default process group.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class TuningInterruptedError(KeyboardInterrupt):
    """Ctrl-C during tuning; the measurements so far are in the cache.

    Attributes:
        plan: the best `Plan` so far. Kernels that were never run are not in it. For kernels that
            were not finished it has torch's own convolution.
    """

    def __init__(self, plan: Any) -> None:
        super().__init__("tuning was interrupted")
        self.plan = plan


class UcudnnWarning(UserWarning):
    """Base of every warning of ucudnn."""


class CacheWarning(UcudnnWarning):
    """Something in the folder of a cache is wrong; the undamaged entries are still used."""


class NoiseWarning(UcudnnWarning):
    """Other processes use the machine during measuring, or times of a plan are unreliable."""


class UntunedWarning(UcudnnWarning):
    """A plan leaves kernels out: the time budget was used up, or nothing fits a workspace limit."""


class WrongResultWarning(UcudnnWarning):
    """A candidate computed a wrong result, and is rejected."""


class UnplannedWarning(UcudnnWarning):
    """Torch's own convolution computes a convolution that a plan was expected to cover."""


class MismatchWarning(UcudnnWarning):
    """A plan was made for a device, versions, threads or a layout other than those here."""


# Packages at whose code no warning points, because users do not change that code.
_NOT_THE_USERS = frozenset(
    {"ucudnn", "torch", "typing_extensions", "contextlib", "concurrent", "threading"}
)


def warn(sentence: str, category: type[UcudnnWarning] = UcudnnWarning) -> None:
    """Warn at the line of the user's code from which ucudnn, or torch, was called.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn("the machine is busy", NoiseWarning)
    >>> caught[0].category.__name__, str(caught[0].message)
    ('NoiseWarning', 'the machine is busy')
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    # In a thread that torch started there is no line of the user's code. Then the warning points at
    # the outermost line.
    warnings.warn(sentence, category, stacklevel=level)


def _package(variables: dict[str, object]) -> str:
    return str(variables.get("__name__")).partition(".")[0]
