"""The networks compute exactly the convolutions of the tables in benchmarks/layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from ucudnn.layer_table import read_rows
from ucudnn.problem import Problem
from ucudnn.steps.tracing import trace


@pytest.mark.parametrize(
    ("source", "name", "table", "batch"),
    [
        ("step_models", "resnet50", "resnet50_n256", 256),
        ("step_models", "alexnet", "alexnet_ucudnn_csv", 256),
        ("step_models", "unet3d", "nnunet_3d_fullres_n2", 2),
        ("step_models", "convnext", "convnext_tiny_n128", 128),
        ("step_models", "sd15", "sd15_unet_n8", 8),
        # Those of the paper on mu-cuDNN.
        ("networks", "alexnet", "alexnet_ucudnn_csv", 256),
        ("networks", "cifar10", "cifar10_caffe_n1024", 1024),
    ],
)
def test_networks_have_the_shapes_of_the_tables(source, name, table, batch, script, repository):
    network = script(source).NETWORKS[name]
    with torch.device("meta"):
        model = network.make() if source == "networks" else network.build(False)
    shape = network.shape[1:] if source == "networks" else network.shape
    assert source == "networks" or network.batch == batch
    problems = trace(model, torch.empty(batch, *shape, device="meta"))
    # wgrad: every convolution has one, a transposed one the same as the plain one it reverses
    found = Counter(plain(one) for one in problems if one.op == "wgrad")
    rows = read_rows(repository / f"benchmarks/layers/{table}.csv", ops=("wgrad",))
    assert found == Counter(plain(row.problem) for row in rows)


def plain(problem: Problem) -> Problem:
    """Without what the tables do not say; ConvNeXt's own permutations change the layout."""
    return replace(problem, math="strict", layout="nchw")


@pytest.mark.parametrize(
    "name", ["resnet50", "alexnet", "unet3d", "convnext", "sd15", "degradation"]
)
def test_small_networks_run_and_have_convolutions(name, script):
    network = script("step_models").NETWORKS[name]
    model = network.build(True)
    outputs = model(network.inputs(2, True, "cpu"))
    for output in outputs if isinstance(outputs, list) else [outputs]:
        assert output.isfinite().all()
        output.sum().backward(retain_graph=True)
    assert all(p.grad is not None for p in model.parameters())
