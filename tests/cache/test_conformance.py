"""Every implementation of a cache keeps the same laws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import laws
import pytest

from ucudnn import cache as caches


def memory(_: Path) -> laws.OpenCache:
    cache = caches.MemoryCache()
    return lambda: cache


def folder(path: Path) -> laws.OpenCache:
    return lambda: caches.open(path / "cache")


def folder_without_locks(path: Path) -> laws.OpenCache:
    return lambda: caches.open(path / "cache", use_locks=False)


def overlay(path: Path) -> laws.OpenCache:
    return lambda: caches.open(f"{path / 'mine'}:{path / 'image'}")


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("kind", [memory, folder, folder_without_locks, overlay])
def test_cache_keeps_the_law(
    law: laws.CacheLaw, kind: Callable[[Path], laws.OpenCache], tmp_path: Path
) -> None:
    law(kind(tmp_path))
