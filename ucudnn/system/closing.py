"""Base class of objects that a `with` statement closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class AbstractClosable(ABC):
    """An object to close, by a `with` statement or by `close`; closing twice does nothing."""

    # Without it even subclasses with slots would have a `__dict__`.
    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Free its resources; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
