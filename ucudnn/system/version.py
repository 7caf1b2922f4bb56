"""Version of this package."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version


# Finding and reading the metadata of a distribution takes a while.
@lru_cache(1)
def own_version() -> str:
    """The version of the installed distribution, "0+unknown" in a source tree without one.

    >>> own_version()[0] in "0123456789"
    True
    """
    try:
        return version("ucudnn")
    except PackageNotFoundError:
        return "0+unknown"
