"""Micro-batching convolution autotuner for PyTorch.

A public name is imported from its module when it is first used (PEP 562). So `import ucudnn` alone
imports neither torch nor the modules of this package.
"""

from __future__ import annotations

import sys
from importlib import import_module

# Type checkers take a variable of this name as true, like `typing.TYPE_CHECKING`. It is not
# imported from `typing`, because that would take longer than the rest of this file.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from ucudnn.config import Config as Config
    from ucudnn.convert import convert_ as convert_
    from ucudnn.convert import installed as installed
    from ucudnn.convert import revert_ as revert_
    from ucudnn.convert import tune_ as tune_
    from ucudnn.errors import PlanError as PlanError
    from ucudnn.errors import UcudnnError as UcudnnError
    from ucudnn.plan import Plan as Plan
    from ucudnn.plan import Split as Split
    from ucudnn.problem import Problem as Problem
    from ucudnn.steps.advise import advise as advise
    from ucudnn.steps.foresee import foresee as foresee
    from ucudnn.steps.tracing import trace as trace
    from ucudnn.steps.tune import tune as tune

    __version__: str

# The names imported above, each with its module. Type checkers find the names in the imports, and
# `__getattr__` finds them in this table.
_MODULE_BY_NAME = {
    "Config": "config",
    "Plan": "plan",
    "PlanError": "errors",
    "Problem": "problem",
    "Split": "plan",
    "UcudnnError": "errors",
    "advise": "steps.advise",
    "foresee": "steps.foresee",
    "convert_": "convert",
    "installed": "convert",
    "revert_": "convert",
    "trace": "steps.tracing",
    "tune": "steps.tune",
    "tune_": "convert",
}
# Submodules that can be used after `import ucudnn` alone, such as `ucudnn.nn`.
_SUBMODULES = ("cache", "distributed", "frameworks", "nn", "solvers")
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
    # The version is looked up only when `__version__` is read, because finding the metadata of a
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
    """Act on UCUDNN_PLAN, UCUDNN_RECORD or UCUDNN_MEMORY_BUDGET; torch calls this at its import.

    UCUDNN_PLAN names a plan that this process follows. UCUDNN_RECORD names a file to which this
    process records its convolutions. UCUDNN_MEMORY_BUDGET has the model of this process planned
    when its first training forward begins. Torch finds this function because the distribution of
    ucudnn registers it as an entry point of the group `torch.backends`.
    """
    files = import_module("ucudnn.config").startup()
    if not files:
        return
    # If the user imported ucudnn first, a module of ucudnn is importing torch at this moment. That
    # module is not complete yet, so the modules that are needed below could not import it. In this
    # case the variables are ignored. A memory budget is then a default of the process's settings.
    own = [module for name, module in sys.modules.items() if name.startswith("ucudnn.")]
    if any(getattr(module.__spec__, "_initializing", False) for module in own):
        if files.plan is not None or files.record is not None:
            import_module("ucudnn.errors").warn(
                "UCUDNN_PLAN and UCUDNN_RECORD have no effect in this process, because it imports "
                "ucudnn before torch; import torch first"
            )
        return
    errors = import_module("ucudnn.errors")
    try:
        import_module("ucudnn.unchanged").follow_startup(files)
    except errors.UcudnnError as error:
        # The process is ended here. If the error were raised, torch would raise another error from
        # it, with the advice to disable the loading of extensions.
        if import_module("ucudnn.config").is_strict():
            sys.exit(f"ucudnn: {error}")
        errors.warn(f"torch's own convolutions run, without UCUDNN_PLAN: {error}")
