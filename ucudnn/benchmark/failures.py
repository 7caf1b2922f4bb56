"""Failures of candidates; the kind of a failure is found from the error that was raised."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ucudnn.errors import first_line
from ucudnn.measurement import FailureKind

# Texts of errors for lack of memory. torch's CPU allocator, CUDA and cuDNN (status 4003 and 4004)
# raise a plain RuntimeError for it, which differs from other errors only by its text.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "HOST_ALLOCATION_FAILED",
    "DEVICE_ALLOCATION_FAILED",
)


class Failure(NamedTuple):
    """A candidate's failure: its kind, and a line that explains it to people."""

    kind: FailureKind
    reason: str


class CandidateError(RuntimeError):
    """A candidate's error in another process, whose original class may not be importable here."""

    def __init__(self, reason: str, kind: FailureKind = FailureKind.ERROR) -> None:
        super().__init__(reason)
        self.kind = kind


class LostError(CandidateError):
    """A candidate ended its process or took too long; `turn` is its index among its rivals."""

    def __init__(self, reason: str, kind: FailureKind = FailureKind.CRASH, turn: int = 0) -> None:
        super().__init__(reason, kind)
        self.turn = turn


def failure_of(error: BaseException) -> Failure:
    r"""The failure of a candidate that raised an error.

    >>> failure_of(RuntimeError("no such kernel\nat length"))
    Failure(kind=<FailureKind.ERROR: 'error'>, reason='no such kernel')
    """
    reason = first_line(error)
    if isinstance(error, CandidateError):
        return Failure(error.kind, reason)
    kind = FailureKind.OUT_OF_MEMORY if is_out_of_memory(error) else FailureKind.ERROR
    return Failure(kind, reason)


def is_out_of_memory(error: BaseException) -> bool:
    """True for errors that mean that there is too little memory.

    >>> is_out_of_memory(RuntimeError("can't allocate memory")), is_out_of_memory(ValueError("no"))
    (True, False)
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
