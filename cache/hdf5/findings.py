"""Findings: sentences on files that could not be read or written, with their severity."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeAlias


class Severity(Enum):
    """Severity of a finding."""

    NOTE = "worth knowing"
    WRONG = "wrong"
    FIXED = "wrong, and put right"


Report: TypeAlias = Callable[[str, Severity], None]
