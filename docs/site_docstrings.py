"""Extension of griffe, which reads the source for the reference of the Python API.

Examples in docstrings are text that begins with `>>>`, where Markdown sees a quotation, and the
settings of `Config` have defaults that are read from the environment, where griffe sees a call.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", re.M)
# Code in a text, and a placeholder such as UCUDNN_<NAME>, which is no tag.
_CODE = re.compile(r"(```.*?```|`[^`]*`)", re.S)
_PLACEHOLDER = re.compile(r"<(?=\w)")


class Docstrings(griffe.Extension):
    """Prepare every docstring and every default of a setting."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for each object that it has read."""
        if obj.docstring:
            obj.docstring.value = prepared(obj.docstring.value)
        if obj.path == "ucudnn.config.Config" and obj.docstring:
            from ucudnn.config import Config

            # It describes every setting, which the source does at the fields.
            obj.docstring.value = prepared(Config.__doc__ or "")
        if obj.is_attribute and obj.path.startswith("ucudnn.config.Config."):
            from ucudnn.config import Config

            if str(obj.value).startswith("_setting("):
                obj.value = repr(getattr(Config(), obj.name))


def prepared(docstring: str) -> str:
    """A docstring as Markdown: examples between fences, and placeholders as they are written.

    Args:
        docstring: without the indentation of its code.
    """
    fenced = _EXAMPLE.sub(r"\g<indent>```pycon\n\g<0>\n\g<indent>```", docstring)
    parts = _CODE.split(fenced)
    # Every second part is code.
    parts[::2] = [_PLACEHOLDER.sub("&lt;", part) for part in parts[::2]]
    return "".join(parts)
