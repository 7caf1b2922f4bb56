"""Modules that FSDP2 has sharded, as plain modules that can be copied, for as long as one plans."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Attributes of modules by which FSDP2 acts, beside its hooks; they refer to its state, which cannot
# be copied.
_STATE = "__composable_api_state_key"


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Context in which the modules of a model have whole parameters, and no class of FSDP2.

    All ranks must enter it, because they gather the parameters, which takes the memory of all
    weights. A module that is sharded has a hook of ours meanwhile, so that no segment is found that
    would gather its parameters for each micro-batch. Other models stay as they are.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    sharded: list[Any] = [one for one in model.modules() if isinstance(one, FSDPModule)]
    if not sharded:
        yield
        return
    parts = dict(model.named_parameters())
    for one in sharded:
        one._get_fsdp_state()._lazy_init()  # as in its first forward; does nothing a second time
        one.unshard()
    for name, whole in model.named_parameters():
        vars(whole)["sharded"] = parts[name]  # which optimisers know
    before = [(one, type(one), dict(vars(one))) for one in model.modules()]
    try:
        for module, _, attributes in before:
            _make_plain(module, attributes, is_sharded=module in sharded)
        yield
    finally:
        for whole in model.parameters():
            del vars(whole)["sharded"]
        for module, kind, attributes in before:
            module.__class__ = kind
            vars(module).update(attributes)
        for one in sharded:
            one.reshard()


def _make_plain(module: nn.Module, attributes: dict[str, Any], *, is_sharded: bool) -> None:
    for name, value in attributes.items():
        if name.startswith(_STATE):
            del vars(module)[name]
        elif name.endswith("_hooks") and value:
            own = {key: hook for key, hook in value.items() if not _is_of_fsdp(hook)}
            vars(module)[name] = OrderedDict(own)
    if is_sharded:
        # A subclass of the module's own class, because no plan can swap a module that is sharded.
        name, _, own_class = (type(module).__name__, *type(module).__bases__)
        module.__class__ = type(name, (own_class,), {})
        module._forward_pre_hooks[-1] = _keep_whole


def _keep_whole(*_: Any) -> None:
    """Stands for the hooks of a module that FSDP2 has sharded."""


_keep_whole.__module__ = "fsdp"  # hooks of this package would not count


def _is_of_fsdp(hook: Any) -> bool:
    owner = getattr(hook, "__func__", hook)
    return str(getattr(owner, "__module__", "")).startswith("torch.distributed.fsdp")
