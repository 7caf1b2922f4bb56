"""What a workspace limit costs on an H200 by cuDNN 9.28's heuristics, number by number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ucudnn.backends.cudnn.offline import enumerate_candidates, list_configurations
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.layer_table import read_rows
from ucudnn.problem import Problem

ROOT = Path(__file__).parents[2]
H200 = ROOT / "benchmarks" / "devices" / "h200.json"
LIMIT = 64 << 20
MIB = 1 << 20
CONV2 = Problem("fprop", 256, 64, 192, (27, 27), (5, 5), padding=((2, 2), (2, 2)))
Inside = Callable[..., Any]


@pytest.fixture
def inside_928(newest: Inside) -> Inside:
    """These numbers are those of one release."""
    if newest("version") != 92800:
        pytest.skip("the first folder of CUDNN_TEST_FOLDERS holds another release than 9.28.0")
    return newest


@pytest.fixture
def landscape(script) -> ModuleType:
    """The script that prints these numbers."""
    return script("cudnn_landscape")


def tensor_cores(found: Iterable[Any]) -> dict[str, int]:
    """Workspace by identity of what uses tensor cores."""
    return {
        identity: workspace for identity, _, workspace, notes in found if "TENSOR_CORE" in notes
    }


def test_alexnet_conv2_keeps_tensor_cores_in_dgrad_only_in_micro_batches(
    inside_928: Inside,
) -> None:
    dgrad = replace(CONV2, op="dgrad")
    whole = tensor_cores(inside_928("found", problem=asdict(dgrad)))
    assert len(whole) > 30
    assert round(min(whole.values()) / MIB, 1) == 183.4
    fits = {
        batch: min(
            tensor_cores(inside_928("found", problem=asdict(dgrad.with_batch(batch)))).values()
        )
        <= LIMIT
        for batch in (128, 64, 32)
    }
    assert fits == {128: False, 64: True, 32: True}


def test_resnet50_is_listed_whole(
    inside_928: Inside, stub_cache: Path, monkeypatch, tmp_path: Path
) -> None:
    """53 layers, 23 of them distinct, three ops, nine batches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(stub_cache))
    monkeypatch.setattr(sys, "path", [str(inside_928.library.parents[3]), *sys.path])
    table = ROOT / "benchmarks" / "layers" / "resnet50_n256.csv"
    layers = [(row.name, row.problem) for row in read_rows(table, has_tf32=True)]
    profile = DeviceProfile.load(H200)
    found = enumerate_candidates(layers, profile, tmp_path / "candidates.csv")
    assert (found.problems, found.candidates, found.rows) == (23 * 3 * 9, 21_532, 51_160)
    assert not found.refused


def test_nnunet_keeps_tensor_cores_in_slabs_where_single_samples_do_not(
    inside_928: Inside, landscape: ModuleType, stub_cache: Path, monkeypatch
) -> None:
    """Of those kernels at N=2 that have no tensor-core configuration within 64 MiB."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(stub_cache))
    monkeypatch.setattr(sys, "path", [str(inside_928.library.parents[3]), *sys.path])
    profile = DeviceProfile.load(H200)
    kernels = landscape.distinct_kernels("nnunet_3d_fullres_n2.csv", "fprop", "float32")
    oversized = [
        listing.problem
        for listing in list_configurations(kernels, profile)
        if landscape.uses_tensor_cores(listing) and not landscape.fits(listing)
    ]
    singles = [kernel.with_batch(1) for kernel in oversized]
    by_batch = sum(map(landscape.fits, list_configurations(singles, profile)))
    assert (len(oversized), by_batch) == (12, 2)
    count = landscape.count_fitting_slabs
    assert count(singles, landscape.WIDE_SLABS, profile) == len(oversized)
    assert count(oversized, landscape.ALL_SLABS, profile) == len(oversized)
