"""Typed facts of a measurement beside its key and its numbers, as a table holds them."""

from __future__ import annotations

from typing import NamedTuple

from ucudnn.measurement import FailureKind, Measurement


class Facts(NamedTuple):
    """Facts of a measurement; the fields are those of `Measurement`, in the same order.

    >>> Facts(lost_to="onednn").lost_to
    'onednn'
    """

    failure: FailureKind | None = None
    lost_to: str = ""
    implementation: str = ""
    is_deterministic: bool = True
    adds_bias: bool = False
    load: float = 0.0

    @classmethod
    def of(cls, measurement: Measurement) -> Facts:
        """The facts of a measurement."""
        return cls(*(getattr(measurement, name) for name in cls._fields))

    @property
    def unusual(self) -> dict[str, object]:
        """Values by name of the facts that differ from their defaults.

        >>> Facts(lost_to="onednn", load=1.5).unusual
        {'lost_to': 'onednn', 'load': 1.5}
        """
        defaults = self._field_defaults
        return {name: value for name, value in self._asdict().items() if value != defaults[name]}
