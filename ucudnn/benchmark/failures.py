"""Failures of candidates; the kind of a failure is found from the error that was raised."""

from __future__ import annotations

import errno
import gc
import traceback
from typing import NamedTuple

import torch

from ucudnn.backends.torch_cpu.processor import give_back_free_blocks, was_short_of_memory
from ucudnn.errors import first_line
from ucudnn.measurement import FailureKind

# Texts of errors for lack of memory. torch's CPU allocator, `std::bad_alloc`, CUDA, cuDNN (status
# 4003 and 4004) and cuBLAS or cuFFT raise a plain RuntimeError for it, which differs from other
# errors only by its text.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "can't start new thread",
)
# Texts of errors that have other causes as well: oneDNN fails so where there is no page for its
# code, and where it does not support an operation. Threads need memory for their stacks.
_MAY_BE_OUT_OF_MEMORY = (
    "could not create a",
    "could not execute a",
    "Resource temporarily unavailable",
)
# What running a candidate may raise.
CANDIDATE_ERRORS = (RuntimeError, MemoryError)


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
    if isinstance(error, CandidateError):
        return error.kind == FailureKind.OUT_OF_MEMORY
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if any(known in text for known in _OUT_OF_MEMORY):
        return True
    return any(known in text for known in _MAY_BE_OUT_OF_MEMORY) and was_short_of_memory()


def free_after(error: BaseException) -> None:
    """Free the memory that a failed run held, so that a smaller one may fit.

    The variables of the functions that the error has ended are deleted. Those of the caller are
    not, because it still runs.
    """
    # An error may hold others: its cause, and one that was being handled when it was raised.
    errors = [error]
    for one in errors:
        traceback.clear_frames(one.__traceback__)
        more = (one.__cause__, one.__context__)
        errors += [other for other in more if other is not None and other not in errors]
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    give_back_free_blocks()
