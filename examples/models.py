"""Networks of the examples, written plainly.

ResNet-18 and ResNet-50 (He, Zhang, Ren, Sun, CVPR 2016, table 1), an image classifier in the manner
of ConvNeXt, a residual network that segments volumes, and the convolution blocks of a conformer.
"""

from __future__ import annotations

from torch import Tensor, nn


def convolution(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, relu: bool = True
) -> nn.Sequential:
    """Convolution without bias, batch normalisation and, unless told otherwise, ReLU."""
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(out_channels),
    ]
    return nn.Sequential(*layers, nn.ReLU(inplace=True)) if relu else nn.Sequential(*layers)


class Residual(nn.Module):
    """A block whose input is added to its output, projected where the shapes differ."""

    def __init__(self, block: nn.Module, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.block = block
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            self.shortcut = convolution(in_channels, out_channels, 1, stride, relu=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (N, in_channels, H, W) to (N, out_channels, H / stride, W / stride)."""
        y: Tensor = self.relu(self.block(x) + self.shortcut(x))
        return y


def basic(in_channels: int, width: int, stride: int) -> Residual:
    """Two 3x3 convolutions."""
    block = nn.Sequential(
        convolution(in_channels, width, 3, stride), convolution(width, width, 3, relu=False)
    )
    return Residual(block, in_channels, width, stride)


def bottleneck(in_channels: int, width: int, stride: int) -> Residual:
    """1x1, 3x3 and 1x1 convolutions, the last four times as wide."""
    block = nn.Sequential(
        convolution(in_channels, width, 1),
        convolution(width, width, 3, stride),
        convolution(width, 4 * width, 1, relu=False),
    )
    return Residual(block, in_channels, 4 * width, stride)


def resnet18(classes: int = 1000) -> nn.Sequential:
    """ResNet-18 for images of 3 channels."""
    stages: list[nn.Module] = []
    channels = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        stages.append(nn.Sequential(basic(channels, width, stride), basic(width, width, 1)))
        channels = width
    return _resnet(stages, channels, classes)


def resnet50(classes: int = 1000) -> nn.Sequential:
    """ResNet-50 for images of 3 channels."""
    stages: list[nn.Module] = []
    channels = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        blocks = [bottleneck(channels, width, stride)]
        channels = 4 * width
        blocks += [bottleneck(channels, width, 1) for _ in range(depth - 1)]
        stages.append(nn.Sequential(*blocks))
    return _resnet(stages, channels, classes)


def _resnet(stages: list[nn.Module], channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        convolution(3, 64, 7, 2),
        nn.MaxPool2d(3, 2, 1),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )


class Shortcut(nn.Sequential):
    """Adds its input to its output."""

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        result: Tensor = super().forward(x)
        return x + result


def classifier(width: int = 48, depth: int = 3, classes: int = 1000) -> nn.Sequential:
    """Blocks of a depthwise 7x7 convolution and two pointwise ones, as those of ConvNeXt."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), nn.GroupNorm(1, width)]
    for stage in range(3):
        if stage:
            layers += [nn.GroupNorm(1, width), nn.Conv2d(width, 2 * width, 2, 2)]
            width *= 2
        layers.append(nn.Sequential(*(_inverted(width) for _ in range(depth))))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def _inverted(width: int) -> Shortcut:
    return Shortcut(
        nn.Conv2d(width, width, 7, padding=3, groups=width),
        nn.GroupNorm(1, width),
        nn.Conv2d(width, 4 * width, 1),
        nn.GELU(),
        nn.Conv2d(4 * width, width, 1),
    )


def segmenter(width: int = 16, classes: int = 2) -> nn.Sequential:
    """Residual blocks with group normalisation at three resolutions of a volume, down and up."""
    layers: list[nn.Module] = [nn.Conv3d(1, width, 3, padding=1), _residual3d(width)]
    for _ in range(2):
        layers += [nn.Conv3d(width, 2 * width, 3, 2, 1), _residual3d(2 * width)]
        width *= 2
    for _ in range(2):
        layers += [nn.ConvTranspose3d(width, width // 2, 2, 2), _residual3d(width // 2)]
        width //= 2
    return nn.Sequential(*layers, nn.GroupNorm(8, width), nn.ReLU(), nn.Conv3d(width, classes, 1))


def _residual3d(width: int) -> Shortcut:
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.GroupNorm(8, width), nn.ReLU(), nn.Conv3d(width, width, 3, padding=1)]
    return Shortcut(*layers)


def conformer(width: int = 512, blocks: int = 4) -> nn.Sequential:
    """Convolution modules of a conformer: pointwise, gated, depthwise of 31 taps, pointwise."""
    return nn.Sequential(
        *(
            Shortcut(
                nn.Conv1d(width, 2 * width, 1),
                nn.GLU(1),
                nn.Conv1d(width, width, 31, padding=15, groups=width),
                nn.BatchNorm1d(width),
                nn.SiLU(),
                nn.Conv1d(width, width, 1),
            )
            for _ in range(blocks)
        )
    )
