"""Networks whose training steps are timed, written plainly, with the shapes of benchmarks/layers.

ResNet-50     He, Zhang, Ren, Sun, CVPR 2016 (examples/models.py)
AlexNet       Krizhevsky, arXiv 1404.5997 (one column)
3-D U-Net     nnU-Net's full-resolution network, Isensee et al., Nature Methods 2021:
              two convolutions per stage, instance normalisation, deep supervision
ConvNeXt-T    Liu et al., CVPR 2022
SD-1.5        the denoiser of Stable Diffusion 1.5, Rombach et al., CVPR 2022
degradation   the one convolution of pytorch#128936
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from models import resnet50


@dataclass(frozen=True)
class Network:
    """A network, its usual batch and inputs, and sizes for a quick look on any machine.

    Args:
        build: makes it; True for the small one.
        batch: the usual batch.
        shape: of one sample of the first input.
        small_shape: that of the small one.
    """

    build: Callable[[bool], nn.Module]
    batch: int
    shape: tuple[int, ...]
    small_shape: tuple[int, ...]

    def inputs(self, batch: int, small: bool, device: str) -> Tensor:
        """Random samples."""
        return torch.randn(batch, *(self.small_shape if small else self.shape), device=device)


class Residual(nn.Module):
    """What a block computes is added to its input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.block = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Shape in, shape out."""
        return x + self.block(x)


def alexnet(small: bool) -> nn.Module:
    """Five convolutions, three linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 384, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        *(nn.AdaptiveAvgPool2d(1 if small else 6), nn.Flatten()),
        *(nn.Linear(256 if small else 9216, 4096), nn.ReLU(inplace=True)),
        *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 1000)),
    )


def normalised(in_channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
    """A 3x3x3 convolution, instance normalisation, leaky ReLU."""
    return nn.Sequential(
        nn.Conv3d(in_channels, out_channels, 3, stride, 1),
        nn.InstanceNorm3d(out_channels, affine=True),
        nn.LeakyReLU(inplace=True),
    )


class UNet3d(nn.Module):
    """An encoder that halves the volume per stage, a decoder that doubles it, one map per scale."""

    def __init__(self, widths: tuple[int, ...], classes: int = 3) -> None:
        super().__init__()
        down, width = [], 1
        for stage, wider in enumerate(widths):
            first = normalised(width, wider, 2 if stage else 1)
            down.append(nn.Sequential(first, normalised(wider, wider)))
            width = wider
        self.down = nn.ModuleList(down)
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, 2) for a, b in pairs)
        self.mix = nn.ModuleList(
            nn.Sequential(normalised(2 * b, b), normalised(b, b)) for _, b in pairs
        )
        self.maps = nn.ModuleList(nn.Conv3d(b, classes, 1) for _, b in pairs)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Shape (N, 1, D, H, W) to maps of (N, classes, ...), the coarsest first."""
        skips = []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
        x, maps = skips.pop(), []
        for up, mix, to_map in zip(self.up, self.mix, self.maps, strict=True):
            x = mix(torch.cat((up(x), skips.pop()), 1))
            maps.append(to_map(x))
        return maps


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        """Shape (N, C, H, W), kept."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext(small: bool) -> nn.Module:
    """Depthwise 7x7 convolutions between linear layers; the tiny variant."""
    depths, widths = ((1, 1), (8, 16)) if small else ((3, 3, 9, 3), (96, 192, 384, 768))
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        if stage:
            layers += [ChannelNorm(widths[stage - 1]), nn.Conv2d(widths[stage - 1], width, 2, 2)]
        layers += [convnext_block(width) for _ in range(depth)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000))
    return nn.Sequential(*layers, *head)


class ToLast(nn.Module):
    """Moves the channels of an image last."""

    def forward(self, x: Tensor) -> Tensor:
        """Shape (N, C, H, W) to (N, H, W, C)."""
        return x.permute(0, 2, 3, 1)


class ToFirst(nn.Module):
    """Moves the channels of an image first."""

    def forward(self, x: Tensor) -> Tensor:
        """Shape (N, H, W, C) to (N, C, H, W)."""
        return x.permute(0, 3, 1, 2)


def convnext_block(width: int) -> Residual:
    """Depthwise convolution, then two linear layers over the channels."""
    return Residual(
        *(nn.Conv2d(width, width, 7, padding=3, groups=width), ToLast(), nn.LayerNorm(width)),
        *(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), ToFirst()),
    )


class TimedResidual(nn.Module):
    """Two 3x3 convolutions, shifted by an embedding of the time step."""

    def __init__(self, in_channels: int, out_channels: int, embedding: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(8, in_channels), nn.SiLU(), nn.Conv2d(in_channels, out_channels, 3, 1, 1)
        )
        self.shift = nn.Sequential(nn.SiLU(), nn.Linear(embedding, out_channels))
        self.second = nn.Sequential(
            nn.GroupNorm(8, out_channels), nn.SiLU(), nn.Conv2d(out_channels, out_channels, 3, 1, 1)
        )
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Shape (N, in_channels, H, W) to (N, out_channels, H, W)."""
        y = self.first(x) + self.shift(time)[:, :, None, None]
        return self.shortcut(x) + self.second(y)


class Attention(nn.Module):
    """Multi-head attention of tokens to a context, with its normalisation and shortcut."""

    def __init__(self, width: int, context: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.pair = nn.Linear(context, 2 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        """Shape (N, tokens, width), kept; without a context tokens attend to each other."""
        y = self.norm(x)
        key, value = self.pair(y if context is None else context).chunk(2, -1)
        parts = [
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.query(y), key, value)
        ]
        z = functional.scaled_dot_product_attention(*parts)
        return x + self.out(z.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Attention within an image and to a text, between two 1x1 convolutions."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.proj_in = nn.Conv2d(width, width, 1)
        self.own, self.cross = Attention(width, width), Attention(width, context)
        self.gate = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 8 * width), nn.GLU())
        self.feed = nn.Linear(4 * width, width)
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Shape (N, width, H, W), kept."""
        y = self.proj_in(self.norm(x))
        tokens = self.cross(self.own(y.flatten(2).transpose(1, 2), None), context)
        tokens = tokens + self.feed(self.gate(tokens))
        return x + self.proj_out(tokens.transpose(1, 2).unflatten(2, x.shape[2:]))


class Stage(nn.Module):
    """Residual blocks, each followed by attention where the stage has it."""

    def __init__(self, pairs: list[tuple[int, int]], embedding: int, context: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TimedResidual(a, b, embedding) for a, b in pairs)
        self.attention = nn.ModuleList(Transformer(b, context) for _, b in pairs if context)

    def run(self, index: int, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """One block with its attention."""
        x = self.blocks[index](x, time)
        return self.attention[index](x, text) if self.attention else x


class Denoiser(nn.Module):
    """A 2-D U-Net with attention to a text; its time step and text are the same for all samples."""

    def __init__(self, widths: tuple[int, ...], context: int) -> None:
        super().__init__()
        time = 4 * widths[0]
        self.register_buffer("time", torch.randn(1, time))
        self.register_buffer("text", torch.randn(1, 77, context))
        self.conv_in = nn.Conv2d(4, widths[0], 3, padding=1)
        # the coarsest stage has no attention
        contexts = [context] * (len(widths) - 1) + [0]
        before = (widths[0], *widths[:-1])
        self.down = nn.ModuleList(
            Stage([(a, b), (b, b)], time, c)
            for a, b, c in zip(before, widths, contexts, strict=True)
        )
        self.shrink = nn.ModuleList(nn.Conv2d(width, width, 3, 2, 1) for width in widths[:-1])
        self.middle = Stage([(widths[-1],) * 2], time, context)
        self.after = TimedResidual(widths[-1], widths[-1], time)
        # every tensor that the way down leaves joins the way up
        skips = [widths[0]]
        for stage, width in enumerate(widths):
            skips += [width] * (3 if stage < len(widths) - 1 else 2)
        up, width = [], widths[-1]
        for wider, c in zip(widths[::-1], contexts[::-1], strict=True):
            pairs = []
            for _ in range(3):
                pairs.append((width + skips.pop(), wider))
                width = wider
            up.append(Stage(pairs, time, c))
        self.up = nn.ModuleList(up)
        self.grow = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for width in widths[:0:-1])
        self.conv_out = nn.Sequential(
            nn.GroupNorm(8, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 4, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shape (N, 4, H, W), kept."""
        time = self.time.expand(len(x), -1)
        text = self.text.expand(len(x), -1, -1)
        x = self.conv_in(x)
        skips = [x]
        for number, stage in enumerate(self.down):
            for index in range(2):
                x = stage.run(index, x, time, text)
                skips.append(x)
            if number < len(self.shrink):
                x = self.shrink[number](x)
                skips.append(x)
        x = self.after(self.middle.run(0, x, time, text), time)
        for number, stage in enumerate(self.up):
            for index in range(3):
                x = stage.run(index, torch.cat((x, skips.pop()), 1), time, text)
            if number < len(self.grow):
                x = self.grow[number](functional.interpolate(x, scale_factor=2.0))
        return self.conv_out(x)


def degradation(small: bool) -> nn.Module:
    """The convolution that is 60 times slower at N=64 than at N=63 in bfloat16, as reported."""
    width = 8 if small else 128
    return nn.Conv2d(width, width, 3, 2)


NETWORKS = {
    "resnet50": Network(lambda _: resnet50(), 256, (3, 224, 224), (3, 32, 32)),
    "alexnet": Network(alexnet, 256, (3, 224, 224), (3, 64, 64)),
    "unet3d": Network(
        lambda small: UNet3d((4, 8) if small else (32, 64, 128, 256, 320, 320)),
        *(2, (1, 128, 128, 128), (1, 16, 16, 16)),
    ),
    "convnext": Network(convnext, 128, (3, 224, 224), (3, 32, 32)),
    "sd15": Network(
        lambda small: Denoiser(*(((8, 16), 16) if small else ((320, 640, 1280, 1280), 768))),
        *(8, (4, 64, 64), (4, 16, 16)),
    ),
    "degradation": Network(degradation, 64, (128, 513, 513), (8, 17, 17)),
}
