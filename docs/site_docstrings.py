"""Extension of griffe, which reads docstrings: examples become blocks of code.

A docstring has its examples as text that begins with `>>>`, where Markdown sees a quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", re.M)


class Examples(griffe.Extension):
    """Put fences around the examples of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for each object that it has read."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """A docstring with fences around its examples.

    Args:
        docstring: without the indentation of its code.
    """
    return _EXAMPLE.sub(lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", docstring)
