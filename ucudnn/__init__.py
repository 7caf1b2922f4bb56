"""Micro-batching convolution autotuner for PyTorch.

Names are resolved at their first use (PEP 562), so importing this package imports neither torch nor
any of its own modules.
"""

from __future__ import annotations

import sys
from importlib import import_module

# Type checkers know this name. Importing `typing` would take longer than the rest of this file.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ucudnn.config import Config as Config
    from ucudnn.convert import convert_ as convert_
    from ucudnn.convert import installed as installed
    from ucudnn.convert import revert_ as revert_
    from ucudnn.convert import tune_ as tune_
    from ucudnn.errors import PlanError as PlanError
    from ucudnn.errors import UcudnnError as UcudnnError
    from ucudnn.plan import Chunk as Chunk
    from ucudnn.plan import Plan as Plan
    from ucudnn.plan import Split as Split
    from ucudnn.problem import Problem as Problem
    from ucudnn.tracing import trace as trace
    from ucudnn.tuning.advisor import advise as advise
    from ucudnn.tuning.model import tune as tune

    __version__: str

# The names imported above, with their modules. Type checkers read the imports above, and
# `__getattr__` reads this table.
_MODULE_BY_NAME = {
    "Chunk": "plan",
    "Config": "config",
    "Plan": "plan",
    "PlanError": "errors",
    "Problem": "problem",
    "Split": "plan",
    "UcudnnError": "errors",
    "advise": "tuning.advisor",
    "convert_": "convert",
    "installed": "convert",
    "revert_": "convert",
    "trace": "tracing",
    "tune": "tuning.model",
    "tune_": "convert",
}
# Submodules that are attributes of `ucudnn` even if the user has not imported them.
_SUBMODULES = ("cache", "distributed", "nn", "solvers")
__all__ = list(_MODULE_BY_NAME)


def __getattr__(name: str) -> Any:
    if name in _MODULE_BY_NAME:
        return getattr(import_module(f"ucudnn.{_MODULE_BY_NAME[name]}"), name)
    if name in _SUBMODULES:
        return import_module(f"ucudnn.{name}")
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'ucudnn' has no attribute {name!r}")


def _version() -> str:
    """The version of the installed distribution; "0+unknown" if no distribution is installed."""
    # This is imported only when `__version__` is read, because finding the metadata of a
    # distribution takes a while.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ucudnn")
    except PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    dunders = (name for name in globals() if name.startswith("__"))
    return sorted({*dunders, *__all__, *_SUBMODULES, "__version__"})


def _autoload() -> None:
    """Do what UCUDNN_PLAN or UCUDNN_RECORD asks for; torch calls this at the end of its import.

    The distribution registers this function as an entry point of the group `torch.backends`.
    """
    files = import_module("ucudnn.config").startup()
    if not files:
        return
    # If a module of ucudnn is still importing torch, other modules cannot import that module yet,
    # so nothing is done.
    if any(getattr(module.__spec__, "_initializing", False) for module in _own_modules()):
        import_module("ucudnn.errors").warn(
            "UCUDNN_PLAN and UCUDNN_RECORD have no effect in this process, because it imports "
            "ucudnn before torch; import torch first"
        )
        return
    errors = import_module("ucudnn.errors")
    try:
        import_module("ucudnn.convert").follow_startup(files)
    except errors.UcudnnError as error:
        # The process is ended here, because a traceback would end with torch's advice to disable
        # its extensions.
        if import_module("ucudnn.config").is_strict():
            sys.exit(f"ucudnn: {error}")
        errors.warn(f"torch's own convolutions run, without UCUDNN_PLAN: {error}")


def _own_modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith("ucudnn.")]
