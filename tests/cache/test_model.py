"""A cache against a dictionary: whatever is done in whatever order, both hold the same."""

from __future__ import annotations

import random
from dataclasses import replace

import laws
import pytest

from ucudnn import cache as caches
from ucudnn.cache import store
from ucudnn.measurement import Measurement, MeasurementKey

KEYS = [one.key for one in laws.sample_measurements(25, seed=8)]


def random_measurement(chance: random.Random) -> Measurement:
    """A measurement of one of KEYS."""
    template = chance.choice(laws.sample_measurements(8, seed=chance.randrange(50)))
    return replace(template, key=chance.choice(KEYS), notes=(str(chance.random()),))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_operations(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_MANY_SEGMENTS", 5)
    chance = random.Random(seed)
    model: dict[MeasurementKey, Measurement] = {}
    handles = [caches.open(tmp_path), caches.open(tmp_path)]
    for _ in range(50):
        place = chance.randrange(2)
        cache = handles[place]
        action = chance.choice(("put", "put", "put", "close", "reopen", "merge", "prune"))
        cache.refresh()
        if action == "put":
            put = [random_measurement(chance) for _ in range(chance.randrange(4))]
            cache.put(put)
            model.update({one.key: one for one in put})
        elif action == "close":
            cache.close()
        elif action == "reopen":
            handles[place] = cache = caches.open(tmp_path)
        elif action == "merge":
            assert cache.merge(tmp_path).added == 0
        elif chance.randrange(3) == 0:
            status = chance.choice(("ok", "failed"))
            gone = [key for key, one in model.items() if one.status == status]
            assert cache.prune({"status": status}) == len(gone)
            for key in gone:
                del model[key]
        assert laws.texts(cache) == laws.texts(model.values())
        key = chance.choice(KEYS)
        assert repr(cache.get(key)) == repr(model.get(key))
    assert handles[0].check().clean
