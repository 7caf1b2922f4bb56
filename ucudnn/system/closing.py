"""Base class of objects that a `with` statement closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class AbstractClosable(ABC):
    """Something to close, at the end of a `with` statement or by hand; twice does no harm."""

    # Without it even subclasses with slots would have a `__dict__`.
    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds; again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
