"""What segments would cost on a GPU that is not here, by a model of an H100's times.

    python benchmarks/virtual_gpu.py segresnet unet diffusion --shares 63%,50%

Steps are foreseen on fake tensors, and each operator takes the time of a model: convolutions by
their operations and by copies of their operands into another layout, group norms by blocks of which
each reduces one group, everything else by the bytes it moves, and each launch by a constant. A
convolution needs as much workspace as its operands that have samples. No step is run, and the times
are not those of a GPU: only their ratios mean something (docs/gpu-status.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from fit_the_step import segresnet
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ucudnn.backends import open_backend
from ucudnn.benchmark.operators import Inside
from ucudnn.outcomes import Way
from ucudnn.steps.foresee import Foreseer
from ucudnn.steps.search import SegmentSearch
from ucudnn.verdict import CLEARLY

# Bytes and operations in a nanosecond (HBM3; TF32 with few channels), bytes that one block reduces
# in a nanosecond, and a launch in nanoseconds.
BANDWIDTH, OPERATIONS, BLOCK, LAUNCH = 2600.0, 80_000.0, 14.0, 4000
aten = torch.ops.aten


def unet() -> nn.Module:
    """A 3-D U-Net with BatchNorm."""
    from monai.networks.nets import UNet

    return UNet(3, 1, 2, (32, 64, 128, 256), (2, 2, 2), num_res_units=2, norm="BATCH")


def diffusion() -> nn.Module:
    """A 3-D U-Net with GroupNorm, for denoising."""
    from monai.networks.nets import DiffusionModelUNet

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            none, channels = (False,) * 3, (32, 64, 64)
            self.net = DiffusionModelUNet(
                3,
                1,
                1,
                channels=channels,
                attention_levels=none,
                num_res_blocks=1,
                norm_num_groups=8,
            )

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.net(x, torch.arange(len(x)))
            return found

    return Denoiser()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "segresnet": (segresnet, 96),
    "unet": (unet, 96),
    "diffusion": (diffusion, 64),
}


def size_of(tensors: object) -> int:
    """Bytes of tensors in nested containers."""
    leaves = [one for one in tree_leaves(tensors) if isinstance(one, Tensor)]
    return sum(one.numel() * one.element_size() for one in leaves)


def convolution_ns(args: Any, out: Any) -> float:
    """Time of a convolution, or of its gradients."""
    x, weight, result, kernels = args[0], args[1], out, 1.0
    if not isinstance(out, Tensor):
        result, x, weight, asked = args[0], args[1], args[2], args[-1]
        kernels = asked[0] + 1.25 * asked[1]
    operations = 2 * result.numel() * weight.numel() / weight.shape[0]
    copies_ns = 3 * size_of((x, result)) / BANDWIDTH
    return kernels * (operations / OPERATIONS + copies_ns + 3 * LAUNCH)


def group_norm_ns(args: Any, out: Any) -> float:
    """Time of a group norm, which first reduces each group in one block, or of its gradients."""
    size = size_of(args[0])
    # Gradients begin with two arguments of activations, which are summed by channel.
    is_forward = not isinstance(args[1], Tensor) or args[1].dim() < 2
    groups = out[1].numel() if is_forward else args[0].shape[0] * args[0].shape[1]
    read, passes, launches = (size, 2, 3) if is_forward else (2 * size, 3, 4)
    sums_ns = max(read / BANDWIDTH, read / groups / BLOCK)
    return sums_ns + passes * size / BANDWIDTH + launches * LAUNCH


def batch_norm_ns(args: Any, out: Any) -> float:
    """Time of a batch norm in training or by given statistics."""
    del out
    passes = 3 if args[5] else 2
    return passes * size_of(args[0]) / BANDWIDTH + (passes - 1) * LAUNCH


def batch_norm_gradients_ns(args: Any, out: Any) -> float:
    """Time of the gradients of a batch norm."""
    del out
    return 5 * size_of(args[0]) / BANDWIDTH + 2 * LAUNCH


TIMES: dict[Any, Callable[[Any, Any], float]] = {
    aten.convolution.default: convolution_ns,
    aten.convolution_backward.default: convolution_ns,
    aten.native_group_norm.default: group_norm_ns,
    aten.native_group_norm_backward.default: group_norm_ns,
    aten.native_batch_norm.default: batch_norm_ns,
    aten.native_batch_norm_backward.default: batch_norm_gradients_ns,
}


class Model:
    """Stands for the table of measured operators."""

    def inside(self, operator: Any, args: Any, kwargs: Any, *_: Any, **__: Any) -> Inside:
        """What the model says that an operator takes."""
        # An operator that writes to its arguments is not called: it returns one of them.
        out = args[0] if operator._schema.is_mutable else operator(*args, **kwargs)
        if "empty" in str(operator):
            return Inside(0, 0)  # it allocates, and launches nothing
        if operator not in TIMES:
            return Inside(0, round(size_of((args, out)) / BANDWIDTH + LAUNCH))
        workspace = 0
        if operator is aten.convolution.default:
            workspace = size_of((args[0], out))
        elif operator is aten.convolution_backward.default:
            workspace = size_of(args[:2])
        return Inside(workspace, round(TIMES[operator](args, out)))


def main() -> None:
    """Print for each network what steps within shares of torch's peak would take."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)}")
    parser.add_argument("--shares", default="63%,50%")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", type=int, help="of each axis of the volume")
    options = parser.parse_args()
    with (
        patch("ucudnn.steps.foresee.operators_of", lambda _: Model()),
        # Normalisations are repeated as on a GPU.
        patch("ucudnn.execution.selective._HOST", "none"),
    ):
        for name in options.networks or NETWORKS:
            make, size = NETWORKS[name]
            torch.manual_seed(0)
            judge(name, make(), torch.randn(options.batch, 1, *[options.size or size] * 3), options)


def judge(name: str, model: nn.Module, x: Tensor, options: argparse.Namespace) -> None:
    """Print the ways of one network."""
    for one in model.parameters():
        one.grad = torch.zeros_like(one)  # as in every step but the first
    search = SegmentSearch(Foreseer(model, x, open_backend("torch_cpu")))
    search.is_dry, search._clearly = True, CLEARLY["cuda"]
    own = search.ways[0]
    print(f"{name}: torch's step has a peak of {own.foreseen_bytes / 2**20:.0f} MiB")

    def show(title: str, way: Way) -> None:
        peak, time_ns = search.needs(way) / own.foreseen_bytes, way.foreseen_ns / own.foreseen_ns
        print(f"  {title}: peak {peak:.0%}, time {time_ns:.3f} {way.name}", flush=True)

    for is_split, kind in ((True, "convolutions in chunks"), (False, "torch's workspace")):
        search.is_split = is_split
        for share in options.shares.split(","):
            limit = float(share.rstrip("%")) / 100 * own.foreseen_bytes
            show(f"within {share}, {kind}", search.within(round(limit)))
    blocks = search.in_blocks()
    if blocks is not None:
        show("each block recomputed", blocks)


if __name__ == "__main__":
    main()
