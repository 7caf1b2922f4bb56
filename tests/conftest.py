"""What every test shares: the repository's root, a clean environment, deterministic Hypothesis."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples on every run and no time limits: a busy machine must not fail a test.
settings.register_profile(
    "ucudnn",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ucudnn")


def pytest_report_header() -> str:
    """Say which ucudnn is under test: the checkout's or an installed one."""
    spec = find_spec("ucudnn")
    return f"ucudnn: {spec.origin if spec else 'not importable'}"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root, where README.md and the examples are."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def package() -> Path:
    """The folder of the package under test."""
    spec = find_spec("ucudnn")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="session", autouse=True)
def _clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No setting of the caller's reaches a test; nothing is written to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("UCUDNN_")]:
            patch.delenv(name)
        patch.setenv("UCUDNN_CACHE", str(tmp_path_factory.mktemp("session-cache")))
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts with an empty measurement cache."""
    monkeypatch.setenv("UCUDNN_CACHE", str(tmp_path / "cache"))
