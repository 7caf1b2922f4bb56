"""Cache of measurements, shared by all processes, kept per device, and safe against crashes.

    base.py       the contract, with the methods that are the same in every cache
    memory.py     a cache in a dictionary
    store.py      a cache in a folder of segments
    segments.py   the files of such a cache
    entries.py    entries, and results of operations
    schema.py     the fields of an entry, as values, texts and cells; CSV files

Importing this package loads no h5py; opening a cache does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ucudnn.cache.base import AbstractCache
from ucudnn.cache.entries import CacheInfo, CheckReport, DeviceInfo, Entry, Explanation, MergeReport
from ucudnn.cache.memory import MemoryCache
from ucudnn.config import Config
from ucudnn.errors import CacheWarning, ConfigError

if TYPE_CHECKING:
    from ucudnn.cache.store import HDF5Cache

__all__ = [
    "open",
    "default_path",
    "AbstractCache",
    "MemoryCache",
    "CacheWarning",
    "Entry",
    "CacheInfo",
    "DeviceInfo",
    "CheckReport",
    "MergeReport",
    "Explanation",
]
_MODES = ("a", "r")


def open(  # noqa: A001 - as in h5py.File and shelve.open, always written ucudnn.cache.open
    path: str | os.PathLike[str] | None = None, mode: str = "a"
) -> HDF5Cache:
    """Open the measurement cache in a folder.

    >>> import tempfile
    >>> with open(tempfile.mkdtemp()) as cache:
    ...     len(cache)
    0

    Args:
        path: a folder. None: UCUDNN_CACHE, else the user's cache directory.
        mode: "a": read and add, the folder is made by the first `put`; "r": only read.

    Raises:
        ConfigError: the mode is neither "a" nor "r".
    """
    # Imported only here, because `store` loads h5py.
    from ucudnn.cache.store import HDF5Cache

    if mode not in _MODES:
        raise ConfigError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
    return HDF5Cache(default_path(path), mode)


def default_path(path: str | os.PathLike[str] | None = None) -> Path:
    """The folder that `open` opens for this path.

    >>> default_path("mine")
    PosixPath('mine')

    Args:
        path: as for `open`.
    """
    if path is None:
        path = Config().cache
    if path is None:
        from platformdirs import user_cache_path

        return user_cache_path("ucudnn", appauthor=False)
    return Path(path).expanduser()
