"""How the steps of a compiled model were compiled before they were timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ucudnn.errors import PlanError
from ucudnn.units import TOO_LARGE


@dataclass(frozen=True, slots=True)
class Compilation:
    """Steps by torch.compile that judged a plan, or the reason why they were not compiled.

    >>> print(Compilation(seconds=34))
    the steps that judged it were compiled by torch.compile, which took 34 s beside the time budget
    >>> Compilation(reason="no C++ compiler").is_compiled
    False

    Args:
        seconds: of compiling and of the first compiled steps, which no time of a step includes.
        reason: why steps of a compiled model were not compiled; "" if they were.
        relaid: convolutions of a compiled step in another layout than the plan has them in, which
            do not follow it.

    Raises:
        PlanError: a value is of another type or out of range.
    """

    seconds: int = 0
    reason: str = ""
    relaid: int = 0

    def __post_init__(self) -> None:
        # Values may come from a plan file that anybody wrote.
        counts = (self.seconds, self.relaid)
        if not all(type(count) is int and 0 <= count < TOO_LARGE for count in counts):
            raise PlanError(f"counts of a compilation must be ints from 0, got {counts}")
        if not isinstance(self.reason, str):
            raise PlanError(f"reason must be a string, got {self.reason!r}")

    @property
    def is_compiled(self) -> bool:
        """True if the steps were compiled."""
        return not self.reason

    def __str__(self) -> str:
        if not self.is_compiled:
            return (
                f"the model is compiled, but the steps that judged its plan were not: {self.reason}"
            )
        text = (
            f"the steps that judged it were compiled by torch.compile, which took {self.seconds} s "
            f"beside the time budget"
        )
        if self.relaid:
            text += (
                f"; there {self.relaid} convolutions are in another layout than in the plan, which "
                f"does not act on them: tune with layout='auto', or in the other layout"
            )
        return text

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Compilation:
        """Build one from the JSON values of `to_dict`."""
        return cls(**values)
