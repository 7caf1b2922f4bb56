"""Every implementation of a cache keeps the same laws."""

from __future__ import annotations

from pathlib import Path

import laws
import pytest

from ucudnn import cache as caches
from ucudnn.cache import store


def memory(_: Path, __: pytest.MonkeyPatch) -> laws.OpenCache:
    cache = caches.MemoryCache()
    return lambda: cache


def folder(path: Path, _: pytest.MonkeyPatch) -> laws.OpenCache:
    return lambda: caches.open(path / "cache")


def folder_without_locks(path: Path, patch: pytest.MonkeyPatch) -> laws.OpenCache:
    patch.setattr(store.FileLock, "acquire", laws.refuse)
    return lambda: caches.open(path / "cache")


CASES = [
    *((memory, law) for law in laws.LAWS),
    *((kind, law) for kind in (folder, folder_without_locks) for law in laws.FOLDER_LAWS),
]


@pytest.mark.parametrize(("kind", "law"), CASES, ids=lambda one: one.__name__)
def test_cache_keeps_the_law(kind, law, tmp_path, monkeypatch):
    law(kind(tmp_path, monkeypatch))
