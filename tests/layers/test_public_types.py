"""Types of public functions: whatever they return is importable from a documented module."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_args, get_type_hints

import ucudnn
from ucudnn import types

PUBLIC = ("ucudnn", "ucudnn.types", "ucudnn.errors", "ucudnn.distributed", "ucudnn.nn")


def classes(hint: Any) -> Iterator[type]:
    """The classes of this package in a type hint."""
    if inspect.isclass(hint) and hint.__module__.startswith("ucudnn"):
        yield hint
    for part in get_args(hint):
        yield from classes(part)


def returned() -> dict[type, str]:
    """Classes that public functions return, and what can be read from these; with the way there."""
    ways: dict[type, str] = {}
    todo = []
    for name in ucudnn.__all__:
        value = getattr(ucudnn, name)
        if inspect.isclass(value):
            todo.append((value, name))
        else:
            hints = get_type_hints(value)
            todo += [(one, f"{name}()") for one in classes(hints.get("return"))]
    while todo:
        found, way = todo.pop()
        if found in ways:
            continue
        ways[found] = way
        for name, hint in get_type_hints(found).items():
            if not name.startswith("_"):
                todo += [(one, f"{way}.{name}") for one in classes(hint)]
        for name, member in vars(found).items():
            function = member.fget if isinstance(member, property) else member
            if inspect.isfunction(function) and not name.startswith("_"):
                hint = get_type_hints(function).get("return")
                todo += [(one, f"{way}.{name}") for one in classes(hint)]
    return ways


def test_what_public_functions_return_has_a_documented_place():
    documented = set()
    for name in PUBLIC:
        module = import_module(name)
        names = getattr(module, "__all__", None) or dir(module)
        documented |= {id(getattr(module, one)) for one in names}
    ways = returned()
    assert types.StepMemory in ways
    assert {way: one for one, way in ways.items() if id(one) not in documented} == {}
