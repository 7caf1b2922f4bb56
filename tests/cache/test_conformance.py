"""Every implementation of a cache keeps the same laws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ucudnn import cache as caches
from ucudnn import testing


def memory(_: Path) -> testing.OpenCache:
    cache = caches.MemoryCache()
    return lambda: cache


def folder(path: Path) -> testing.OpenCache:
    return lambda: caches.open(path / "cache")


def folder_without_locks(path: Path) -> testing.OpenCache:
    return lambda: caches.open(path / "cache", use_locks=False)


def overlay(path: Path) -> testing.OpenCache:
    return lambda: caches.open(f"{path / 'mine'}:{path / 'image'}")


@pytest.mark.parametrize("law", testing.CACHE_LAWS, ids=testing.law_name)
@pytest.mark.parametrize("kind", [memory, folder, folder_without_locks, overlay])
def test_cache_keeps_the_law(
    law: testing.CacheLaw, kind: Callable[[Path], testing.OpenCache], tmp_path: Path
) -> None:
    law(kind(tmp_path))
