"""Micro-batching convolution autotuner for PyTorch.

Names are resolved at their first use (PEP 562), so importing this package imports neither torch nor
any of its own modules.
"""

from __future__ import annotations

import sys
from importlib import import_module

# As type checkers know it; loading `typing` takes longer than all other work of this import.
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

# The same names as above: type checkers read the imports, `__getattr__` reads this.
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
# Reached as attributes without an import statement of their own.
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
    """The version of the installed distribution, "0+unknown" in a source tree without one."""
    # Only here: finding and reading the metadata of a distribution takes a while.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ucudnn")
    except PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    dunders = (name for name in globals() if name.startswith("__"))
    return sorted({*dunders, *__all__, *_SUBMODULES, "__version__"})


def _autoload() -> None:
    """Follow UCUDNN_PLAN or UCUDNN_RECORD: torch calls this at the end of its import.

    It is the entry point `torch.backends` of the distribution.
    """
    files = import_module("ucudnn.config").startup()
    if not files:
        return
    # A module of ucudnn that imports torch is not ready now, and others cannot import it.
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
        # As an exception it would stand far above torch's advice to disable its extensions.
        if import_module("ucudnn.config").is_strict():
            sys.exit(f"ucudnn: {error}")
        errors.warn(f"torch's own convolutions run, without UCUDNN_PLAN: {error}")


def _own_modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith("ucudnn.")]
