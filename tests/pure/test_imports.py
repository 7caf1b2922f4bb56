"""Imports: light where they must be, and few public names; import-linter has the directions."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path

import pytest

import ucudnn

HEAVY = {"torch", "h5py", "pulp", "highspy", "cupy", "pynvml"}
MAKING = {"ucudnn.kernels", "ucudnn.steps", "ucudnn.benchmark"}
HELP = """
import sys
sys.argv = ["ucudnn", "--help"]
from ucudnn.cli import main
try: main()
except SystemExit: pass"""
LOADING = """
from ucudnn import Config, Plan, distributed
from ucudnn.backends.registry import identify
from ucudnn.measurement import Conditions
Plan((), *identify("torch_cpu"), Conditions(), Config(), "torch_cpu").save("plan.json")
distributed.load("plan.json")"""
PROGRAMS = {
    "import ucudnn": HEAVY,
    "import ucudnn.solvers": HEAVY,
    "import ucudnn.cache": HEAVY,
    "import ucudnn.plan": HEAVY,
    HELP: HEAVY,
    "import ucudnn.convert": MAKING,
    LOADING: MAKING,
}


@pytest.mark.parametrize(("program", "absent"), PROGRAMS.items(), ids=PROGRAMS)
def test_importing_helping_and_following_a_plan_load_little(program, absent, python, tmp_path):
    done = python("-c", f"{program}\nimport sys; print(*sys.modules)", cwd=tmp_path)
    loaded = done.stdout.splitlines()[-1].split()
    assert not absent & set(loaded)
    assert 0 < sum(map(is_ours, loaded)) <= 38
    assert "tune" in done.stdout or program is not HELP


def test_every_module_can_be_imported_without_optional_packages() -> None:
    for module in pkgutil.walk_packages(ucudnn.__path__, "ucudnn."):
        if module.name != "ucudnn.__main__":
            importlib.import_module(module.name)


def test_what_tab_and_help_show() -> None:
    assert [name for name in dir(ucudnn) if not name.startswith("_")] == sorted(
        [*ucudnn.__all__, "cache", "distributed", "frameworks", "nn", "solvers"]
    )
    shown = inspect.signature(ucudnn.Config).parameters
    settings = ucudnn.Config.from_dict(ucudnn.Config().to_dict())
    assert all(getattr(settings, name) == one.default for name, one in shown.items())
    assert ucudnn.Config(*(one.default for one in shown.values())) == settings


def test_importing_the_package_loads_one_module_of_it_and_reads_no_metadata(python):
    program = (
        "import json, sys; before = set(sys.modules); import ucudnn; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = json.loads(python("-c", program).stdout)
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


def test_type_checkers_see_the_names_that_exist_when_it_runs():
    tree = ast.parse(Path(ucudnn.__file__).read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname or alias.name: str(node.module)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and is_ours(str(node.module))
        for alias in node.names
    }
    assert set(seen) == set(ucudnn.__all__)
    for public, source in seen.items():
        assert getattr(ucudnn, public) is getattr(importlib.import_module(source), public)


def is_ours(name: str) -> bool:
    return name.partition(".")[0] == "ucudnn"
