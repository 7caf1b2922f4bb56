"""Explain why a key is a miss: find the nearest entry and the fields in which it differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from ucudnn.cache.entries import Difference, Entry, Explanation
from ucudnn.cache.table.schema import KEY_FIELDS
from ucudnn.errors import ConfigError
from ucudnn.measurement import Measurement, MeasurementKey

_PARTS = tuple(item.name for item in fields(MeasurementKey))


def key_texts(key: MeasurementKey) -> dict[str, str]:
    """Every field of a key as text, by name."""
    entry = Entry(Measurement(key, "untimed"))
    return {field.name: field.text(entry) for field in KEY_FIELDS}


def explain(wanted: Mapping[str, str], keys: Iterable[MeasurementKey]) -> Explanation:
    """Find the key that differs from the wanted values in the fewest fields.

    Of several such keys, one whose problem and algorithm differ least is preferred, then the first.

    Args:
        wanted: text by field name; other fields may have any value.
        keys: the keys of a cache.

    Raises:
        ConfigError: a field that keys do not have.
    """
    names = [field.name for field in KEY_FIELDS]
    for name in wanted:
        if name not in names:
            raise ConfigError(f"{name!r} is not a field of a key; those are {', '.join(names)}")
    counters = [(part, _difference_counter(part, wanted)) for part in _PARTS]
    count, nearest, least = 0, None, (len(KEY_FIELDS) + 1, 0)
    for key in keys:
        count += 1
        distances = [differences(getattr(key, part)) for part, differences in counters]
        # "Another version of cuDNN" explains a miss better than "another layer".
        distance = (sum(distances), distances[0] + distances[1])
        if distance < least:
            nearest, least = key, distance
    if nearest is None:
        return Explanation(count, None)
    there = key_texts(nearest)
    differences = tuple(
        Difference(name, text, there[name]) for name, text in wanted.items() if there[name] != text
    )
    return Explanation(count, nearest, differences)


def _difference_counter(part: str, wanted: Mapping[str, str]) -> Callable[[Any], int]:
    """A function that counts the fields of one part of a key which differ from the wanted ones."""
    compared = [
        field
        for field in KEY_FIELDS
        if (field.part or field.own_name) == part and field.name in wanted
    ]

    # Keys share their parts: a million entries may have one device and a thousand problems.
    @cache
    def differences(value: Any) -> int:
        texts = (
            (field, field.kind.dump(getattr(value, field.own_name) if field.part else value))
            for field in compared
        )
        return sum(text != wanted[field.name] for field, text in texts)

    return differences
