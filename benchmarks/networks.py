"""Networks whose whole steps are timed on a CPU, with the shapes of their inputs.

Those of transformers and monai (the extra `test`) have random weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


class Network(NamedTuple):
    """How a network is made, and the shape of its input."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


class Gated(nn.Module):
    """A layer of WaveNet: a gated dilated convolution of two taps, and a shortcut.

    Args:
        width: channels.
        dilation: between the taps.
    """

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.taps = nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.mix = nn.Conv1d(width, width, 1)
        self.pad = nn.ConstantPad1d((dilation, 0), 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        gated = nn.functional.glu(self.taps(self.pad(x)), 1)
        result: Tensor = x + self.mix(gated)
        return result


def large_kernels(width: int = 128, blocks: int = 2) -> nn.Module:
    """Depthwise 31x31 convolutions between 1x1 ones."""
    from models import Shortcut

    return nn.Sequential(
        nn.Conv2d(3, width, 4, 4),
        *(
            Shortcut(
                nn.Conv2d(width, width, 31, padding=15, groups=width),
                nn.BatchNorm2d(width),
                nn.Conv2d(width, width, 1),
                nn.GELU(),
            )
            for _ in range(blocks)
        ),
    )


def wavenet(width: int = 64) -> nn.Module:
    """Ten layers whose dilation doubles."""
    layers = (Gated(width, 2**power) for power in range(10))
    return nn.Sequential(nn.Conv1d(1, width, 1), *layers, nn.Conv1d(width, 1, 1))


def hugging_face(name: str, **settings: Any) -> nn.Module:
    """A network of transformers with random weights."""
    import transformers

    made = getattr(transformers, name)
    network: nn.Module = made(made.config_class(**settings))
    return network


def vgg11() -> nn.Module:
    """VGG of eleven layers without its classifier (Simonyan and Zisserman, ICLR 2015, column A)."""
    layers: list[nn.Module] = []
    before = 3
    for width, count in ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2)):
        for _ in range(count):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def alexnet() -> nn.Module:
    """AlexNet in one column, with the shapes of benchmarks/layers/alexnet_ucudnn_csv.csv."""
    import step_models

    return step_models.alexnet(small=False)


def cifar10() -> nn.Module:
    """Caffe's quick network for CIFAR-10, whose training the authors of µ-cuDNN timed."""
    layers: list[nn.Module] = []
    for before, width in ((3, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(before, width, 5, padding=2), nn.ReLU()]
        layers.append(nn.AvgPool2d(3, 2, ceil_mode=True))
    layers[1:3] = [nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.Linear(64, 10))


def unet3d(norm: str = "instance") -> nn.Module:
    """A U-Net for volumes with 3x3x3 convolutions, and normalisation by instance or by batch."""
    from monai.networks.nets import DynUNet

    sizes = [[3, 3, 3]] * 5
    strides = [[1, 1, 1], *[[2, 2, 2]] * 4]
    settings = (norm, {"affine": True})
    network: nn.Module = DynUNet(3, 1, 3, sizes, strides, strides[1:], norm_name=settings)
    return network


class Residual(nn.Module):
    """Two convolutions beside a shortcut, as in networks for super-resolution (Lim et al., EDSR).

    Args:
        width: channels.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        result: Tensor = x + 0.1 * self.second(torch.relu(self.first(x)))
        return result


class SuperResolution(nn.Module):
    """Residual blocks without normalisation, between two convolutions.

    Args:
        blocks: how many.
        width: channels.
    """

    def __init__(self, blocks: int = 16, width: int = 64) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.tail = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        result: Tensor = self.tail(self.body(self.head(x)))
        return result


def plain(name: str) -> nn.Module:
    """One of the examples'."""
    import models

    network: nn.Module = getattr(models, name)()
    return network


def frozen(name: str) -> nn.Module:
    """One of the examples', in training with fixed statistics of batch norms, as in fine-tuning."""
    network = plain(name)
    for one in network.modules():
        if isinstance(one, nn.modules.batchnorm._BatchNorm):
            one.eval()
    return network


class Decoder(nn.Module):
    """The decoder of a latent diffusion model's autoencoder, as wide as Stable Diffusion's."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import AutoencoderKL

        self.autoencoder = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=4,
        )
        del self.autoencoder.encoder

    def forward(self, latent: Tensor) -> Tensor:
        """An image of eight times the height and the width."""
        image: Tensor = self.autoencoder.decode(latent).sample
        return image


NETWORKS = {
    "alexnet": Network(alexnet, (128, 3, 224, 224)),
    "cifar10": Network(cifar10, (1024, 3, 32, 32)),
    "resnet18": Network(partial(plain, "resnet18"), (32, 3, 224, 224)),
    "resnet50": Network(partial(plain, "resnet50"), (16, 3, 224, 224)),
    "vgg11": Network(vgg11, (8, 3, 224, 224)),
    "mobilenetv2": Network(partial(hugging_face, "MobileNetV2Model"), (8, 3, 224, 224)),
    "efficientnet": Network(
        # B0 of Tan and Le, ICML 2019; the defaults are those of B7
        partial(
            hugging_face,
            "EfficientNetModel",
            width_coefficient=1.0,
            depth_coefficient=1.0,
            hidden_dim=1280,
            image_size=224,
        ),
        (8, 3, 224, 224),
    ),
    "convnext": Network(partial(hugging_face, "ConvNextModel"), (4, 3, 224, 224)),
    "depthwise31": Network(large_kernels, (4, 3, 112, 112)),
    "unet3d": Network(unet3d, (1, 1, 64, 64, 64)),
    "wav2vec2": Network(
        partial(hugging_face, "Wav2Vec2Model", apply_spec_augment=False, layerdrop=0.0), (2, 32000)
    ),
    "hifigan": Network(partial(hugging_face, "SpeechT5HifiGan"), (2, 64, 80)),
    "conformer": Network(partial(plain, "conformer"), (8, 512, 200)),
    "wavenet": Network(wavenet, (4, 1, 4096)),
    "conv1d": Network(lambda: nn.Conv1d(512, 512, 3, 2), (4, 512, 6400)),
}

# Inputs of which a step takes at most 0.7 s on two cores, for `make bench`; others keep theirs.
QUICK_SHAPES = {
    "alexnet": (32, 3, 224, 224),
    "resnet18": (8, 3, 224, 224),
    "resnet50": (2, 3, 224, 224),
    "vgg11": (2, 3, 224, 224),
    "unet3d": (1, 1, 32, 32, 32),
    "wav2vec2": (1, 24000),
}
# The first one is where a CPU gains most; wav2vec 2.0 and HiFi-GAN are for sound, the U-Net for
# volumes, the others for images.
QUICK = (
    ("conformer", "inference"),
    ("conformer", "training"),
    ("alexnet", "training"),
    ("resnet18", "training"),
    ("resnet50", "training"),
    ("vgg11", "training"),
    ("convnext", "training"),
    ("mobilenetv2", "training"),
    ("unet3d", "training"),
    ("wav2vec2", "training"),
    ("hifigan", "training"),
)


def example(name: str, shape: tuple[int, ...], is_training: bool) -> tuple[nn.Module, Tensor]:
    """A network and an input, with the same values in every process.

    Args:
        name: one of NETWORKS.
        shape: of the input.
        is_training: else its parameters need no gradients.
    """
    torch.manual_seed(0)
    model, x = NETWORKS[name].make().train(is_training), torch.randn(shape)
    if not is_training:
        calibrate_(model.requires_grad_(False), x)
    return model, x


def calibrate_(model: nn.Module, x: Tensor) -> None:
    """Set the statistics of batch norms to those of a batch.

    With their first values the activations of a deep network with random weights fade to denormal
    numbers, which take a CPU ten times as long.
    """
    norms = [one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    momenta = [one.momentum for one in norms]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        model(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def shape_of(text: str) -> tuple[int, ...]:
    """Read a shape such as 8x3x224x224."""
    return tuple(map(int, text.split("x")))
