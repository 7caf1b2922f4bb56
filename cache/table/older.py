"""Reading of files of ucudnn before 0.1.0, whose rows state facts in their texts alone.

Nothing else takes such a text apart, and no row is written in this way any more.
"""

from __future__ import annotations

from functools import lru_cache

from ucudnn.cache.table.facts import Facts
from ucudnn.measurement import Subject

_LOST_TO = "beaten by "
_CALL = "plan["
_MACHINE = ("roofline operations", "roofline bytes", "planned call")
_IMPLEMENTATION = "kernel="
_LOAD = "load="
_NONDETERMINISTIC = "nondeterministic"
_ADDS_BIAS = "adds bias"


@lru_cache(maxsize=4096)
def read_older(
    algorithm: str, status: str, reason: str, notes: tuple[str, ...]
) -> tuple[str, tuple[str, ...], Facts]:
    """Reason, notes and facts that the texts of an older row stand for.

    >>> read_older("gemm", "screened", "beaten by onednn", ("max_ulp=2", "load=1.5"))[:2]
    ('', ('max_ulp=2',))
    >>> read_older("gemm", "screened", "beaten by onednn", ("max_ulp=2", "load=1.5"))[2].unusual
    {'lost_to': 'onednn', 'load': 1.5}

    Args:
        algorithm: its name.
        status: as in `Measurement`.
        reason: why it failed, or which algorithm it lost against.
        notes: as they were written.
    """
    facts = Facts(subject=_subject(algorithm))
    if status == "screened" and reason.startswith(_LOST_TO):
        facts, reason = facts._replace(lost_to=reason.removeprefix(_LOST_TO)), ""
    left = []
    for note in notes:
        if note.startswith(_IMPLEMENTATION):
            facts = facts._replace(implementation=note.removeprefix(_IMPLEMENTATION))
        elif note == _NONDETERMINISTIC:
            facts = facts._replace(is_deterministic=False)
        elif note == _ADDS_BIAS:
            facts = facts._replace(adds_bias=True)
        elif note.startswith(_LOAD) and (load := _number(note.removeprefix(_LOAD))):
            facts = facts._replace(load=load)
        else:
            left.append(note)
    return reason, tuple(left), facts


def _subject(algorithm: str) -> Subject:
    if algorithm.startswith(_CALL):
        return Subject.CALL
    return Subject.MACHINE if algorithm in _MACHINE else Subject.CHUNK


def _number(text: str) -> float:
    """The number that a text is; 0 for any other text."""
    try:
        return float(text)
    except ValueError:
        return 0.0
