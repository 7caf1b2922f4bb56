"""What slabs give on an H200 by cuDNN 9.28's heuristics."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ucudnn.backends.cudnn.offline import list_configurations
from ucudnn.backends.cudnn.profile import DeviceProfile

ROOT = Path(__file__).parents[2]
H200 = ROOT / "benchmarks" / "devices" / "h200.json"


def test_nnunet_keeps_tensor_cores_in_slabs_where_single_samples_do_not(
    newest, script, stub_cache, monkeypatch
):
    """Of those kernels at N=2 that have no tensor-core configuration within 64 MiB."""
    if newest("version") != 92800:  # the numbers are those of one release
        pytest.skip("the first folder of CUDNN_TEST_FOLDERS holds another release than 9.28.0")
    landscape = script("cudnn_landscape")
    monkeypatch.setenv("XDG_CACHE_HOME", str(stub_cache))
    monkeypatch.setattr(sys, "path", [str(newest.library.parents[3]), *sys.path])
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
