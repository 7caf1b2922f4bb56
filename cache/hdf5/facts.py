"""Facts of measurements as texts of a file: JSON objects of those that differ from their defaults.

Few measurements have any, and many of those have the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from ucudnn.cache.hdf5.envelope import DamagedError
from ucudnn.cache.table.facts import Facts
from ucudnn.cache.table.rows import Array
from ucudnn.cache.table.schema import FIELD_BY_NAME
from ucudnn.measurement import FailureKind
from ucudnn.system.files import parse_json

# Facts that are one of a few words.
_WORDS: dict[str, type[StrEnum]] = {"failure": FailureKind}


def facts_to_text(facts: Facts) -> str:
    """Facts as text.

    >>> facts_to_text(Facts(lost_to="onednn")), facts_to_text(Facts())
    ('{"lost_to": "onednn"}', '{}')
    """
    return json.dumps(facts.unusual, ensure_ascii=False)


def facts_from_texts(texts: Sequence[str]) -> tuple[list[Facts], Array]:
    """The facts in texts of `facts_to_text`, and a mask of those that this version does not know.

    >>> facts_from_texts(['{"lost_to": "gemm"}', '{"energy_uj": 4}'])[1].tolist()
    [False, True]

    Raises:
        DamagedError: a text holds something else.
    """
    facts, unknown = list[Facts](), np.zeros(len(texts), bool)
    for place, text in enumerate(texts):
        values = parse_json(text)
        if not isinstance(values, dict):
            raise DamagedError("its facts are no JSON objects")
        # A later version may have facts, or words for them, that this one does not know.
        unknown[place] = not all(_is_known(name, value) for name, value in values.items())
        facts.append(Facts() if unknown[place] else _facts(values))
    return facts, unknown


def _is_known(name: str, value: Any) -> bool:
    if name not in Facts._fields or not FIELD_BY_NAME[name].kind.accepts(value):
        return False
    return name not in _WORDS or value in tuple(_WORDS[name])


def _facts(values: dict[str, Any]) -> Facts:
    words = {name: words(values[name]) for name, words in _WORDS.items() if name in values}
    return Facts(**{**values, **words})
