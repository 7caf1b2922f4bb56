"""Errors: one base class; each message is a sentence with the rule, the value and the remedy."""

from __future__ import annotations

# A damaged file can hold a value of any length, and a message must stay readable.
_LONGEST_QUOTE = 300


def shortened(sentence: str) -> str:
    """Cut the middle out of a sentence that quotes a long part of a file.

    >>> len(shortened("got " + "9" * 5000)), shortened("got 9")
    (300, 'got 9')
    """
    if len(sentence) <= _LONGEST_QUOTE:
        return sentence
    # 5 characters are the dots and the blanks around them; both ends tell where the text is from.
    half = (_LONGEST_QUOTE - 5) // 2
    return f"{sentence[: half + 1]} ... {sentence[-half:]}"


class UcudnnError(Exception):
    """Base of every error that ucudnn raises on purpose."""


class ProblemError(UcudnnError, ValueError):
    """A convolution that cannot exist: the message names the field, its value and the rule."""


class ConfigError(UcudnnError, ValueError):
    """A setting, flag, file or environment variable with a value that is not allowed."""


class UnsupportedError(UcudnnError):
    """A valid problem that this backend or this algorithm cannot compute."""


class BusyError(UcudnnError):
    """Nothing can be measured now, for a temporary reason; the cache records no failure."""


class CacheError(UcudnnError):
    """A measurement cache that cannot be read or written."""


class PlanError(UcudnnError):
    """No plan fits, or a plan does not belong to this model or device.

    Attributes:
        smallest_bytes: the smallest workspace limit in bytes with which a plan exists; None if
            there is none.
    """

    def __init__(self, message: str, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class RankError(UcudnnError):
    """Ranks of one job that do not agree, or do not answer; the message names them.

    Attributes:
        ranks: numbers of the named ranks in the default process group.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
