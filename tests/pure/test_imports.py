"""Imports: light where they must be, and few public names; import-linter has the directions."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ucudnn

HEAVY = {"torch", "h5py", "pulp", "highspy", "cupy", "pynvml"}


@pytest.mark.parametrize(
    "name", ["ucudnn", "ucudnn.solvers", "ucudnn.cache", "ucudnn.plan", "ucudnn.types"]
)
def test_importing_loads_no_framework(name: str, package: Path, tmp_path: Path) -> None:
    program = f"import json, sys, {name}; print(json.dumps([{name}.__file__, list(sys.modules)]))"
    output = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
    ).stdout
    file, modules = json.loads(output)
    assert Path(file).is_relative_to(package)
    assert not HEAVY & set(modules)


def test_every_module_can_be_imported_without_optional_packages() -> None:
    for module in pkgutil.walk_packages(ucudnn.__path__, "ucudnn."):
        if module.name != "ucudnn.__main__":
            importlib.import_module(module.name)


def test_following_a_plan_loads_nothing_that_makes_one() -> None:
    program = "import sys, ucudnn.convert; print('ucudnn.tuning' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert output.stdout.strip() == b"False"


def test_what_tab_and_help_show() -> None:
    assert [name for name in dir(ucudnn) if not name.startswith("_")] == sorted(
        [*ucudnn.__all__, "cache", "distributed", "nn", "solvers"]
    )
    shown = inspect.signature(ucudnn.Config).parameters
    settings = ucudnn.Config.from_dict(ucudnn.Config().to_dict())
    assert all(getattr(settings, name) == one.default for name, one in shown.items())
    assert ucudnn.Config(*(one.default for one in shown.values())) == settings


def test_importing_the_package_loads_one_module_of_it_and_reads_no_metadata(package: Path) -> None:
    program = (
        "import json, sys; before = set(sys.modules); import ucudnn; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    output = subprocess.run(command, check=True, capture_output=True, env=environment).stdout
    loaded = json.loads(output)
    assert [name for name in loaded if is_ours(name)] == ["ucudnn"]
    assert {name.partition(".")[0] for name in loaded} - {"ucudnn"} <= sys.stdlib_module_names
    # The slowest of what the standard library would be asked for.
    assert not {"importlib.metadata", "typing"} & set(loaded)


def test_at_most_fourteen_public_names_and_each_is_there() -> None:
    assert len(ucudnn.__all__) <= 14
    for name in ucudnn.__all__:
        assert not name.startswith("_")
        assert getattr(ucudnn, name).__module__.startswith("ucudnn.")
        assert name in dir(ucudnn)
    with pytest.raises(AttributeError, match="has no attribute 'autotune'"):
        _ = ucudnn.autotune


def test_type_checkers_see_the_names_that_exist_when_it_runs(package: Path) -> None:
    tree = ast.parse((package / "__init__.py").read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname or alias.name
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and is_ours(str(node.module))
        for alias in node.names
    }
    assert seen == set(ucudnn.__all__)


def test_every_name_of_types_is_there_and_known_to_type_checkers(package: Path) -> None:
    from ucudnn import types

    tree = ast.parse((package / "types.py").read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (node.module, alias.asname or alias.name)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name for _, name in seen} == set(types.__all__)
    for module, name in seen:
        assert getattr(types, name) is getattr(sys.modules[str(module)], name)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = types.Nothing


def is_ours(name: str) -> bool:
    return name.partition(".")[0] == "ucudnn"
