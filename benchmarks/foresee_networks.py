"""Networks of MONAI, diffusers and transformers, in small, for benchmarks of whole steps.

A training step takes about 20 to 450 MiB and at most about two seconds on one thread. All networks
have random weights and are in training mode; their packages are in the extra `test`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from networks import NETWORKS as OWN
from networks import hugging_face
from torch import Tensor, nn

Shape = tuple[int, ...]
# A model, and its inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs.
Example = tuple[nn.Module, Any]


def below(high: int, *shape: int) -> Callable[[], Tensor]:
    """What makes a tensor of integers, such as token ids and time steps."""
    return partial(torch.randint, high, shape)


def inputs_of(made: Any) -> Any:
    """Inputs from shapes of normally distributed tensors, and from what makes others."""
    if isinstance(made, dict):
        return {name: inputs_of(one) for name, one in made.items()}
    if callable(made):
        return made()
    if all(isinstance(size, int) for size in made):
        return torch.randn(made)
    return tuple(map(inputs_of, made))


def own(name: str, *shape: int) -> Example:
    """One of `networks`, with a smaller input."""
    return OWN[name].make(), torch.randn(shape)


def monai(name: str, made: Any, **settings: Any) -> Example:
    """A network of MONAI."""
    import monai.networks.nets

    return getattr(monai.networks.nets, name)(**settings), inputs_of(made)


def diffusers(name: str, made: Any, **settings: Any) -> Example:
    """A network of diffusers."""
    import diffusers

    return getattr(diffusers, name)(**settings), inputs_of(made)


def transformers(name: str, made: Any, **settings: Any) -> Example:
    """A network of transformers."""
    return hugging_face(name, **settings), inputs_of(made)


def with_resnet(name: str, made: Any, stages: tuple[str, ...], **settings: Any) -> Example:
    """A detector or segmenter of transformers, on the stages of a small ResNet."""
    from transformers import ResNetConfig

    backbone = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[1] * 4,
        layer_type="basic",
        out_features=[*stages],
    )
    return transformers(name, made, backbone_config=backbone, **settings)


def mask2former(*shape: int) -> Example:
    """Mask2Former on a small Swin, whose masks decide what its attention sees."""
    from transformers import SwinConfig

    backbone = SwinConfig(
        embed_dim=32,
        depths=[1] * 4,
        num_heads=[2, 2, 4, 4],
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    settings = {"hidden_dim": 64, "feature_size": 64, "mask_feature_size": 64, "num_queries": 20}
    return transformers(
        "Mask2FormerModel",
        {"pixel_values": shape},
        backbone_config=backbone,
        encoder_layers=2,
        decoder_layers=3,
        encoder_feedforward_dim=128,
        dim_feedforward=128,
        num_attention_heads=4,
        **settings,
    )


CHANNELS = {"channels": (16, 32, 64, 128), "strides": (2, 2, 2)}
PLAIN = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
STEPS = {"sample": (2, 4, 32, 32), "timestep": below(1000, 2)}
PROMPTED = {**STEPS, "encoder_hidden_states": (2, 8, 32)}
CONDITIONAL = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
    "norm_num_groups": 8,
}
DYNAMIC = {"kernel_size": [3] * 4, "strides": [1, 2, 2, 2], "upsample_kernel_size": [2] * 3}
SMALL = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
SPEECH = {**SMALL, "intermediate_size": 384, "conv_dim": [128] * 7}
DETECTOR = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_queries": 20,
}

NETWORKS: dict[str, Callable[[], Example]] = {
    # of torch alone
    "resnet18": partial(own, "resnet18", 4, 3, 128, 128),
    "cifar10": partial(own, "cifar10", 256, 3, 32, 32),
    "depthwise31": partial(own, "depthwise31", 4, 3, 128, 128),
    "conformer": partial(own, "conformer", 4, 512, 100),
    "wavenet": partial(own, "wavenet", 4, 1, 4096),
    # volumes
    "segresnet": partial(monai, "SegResNet", (1, 1, 48, 48, 48), **PLAIN, init_filters=16),
    "segresnet-vae": partial(
        monai, "SegResNetVAE", (1, 1, 32, 48, 48), **PLAIN, input_image_size=(32, 48, 48)
    ),
    "segresnet-ds": partial(
        monai, "SegResNetDS", (1, 1, 48, 48, 48), **PLAIN, init_filters=8, dsdepth=3
    ),
    "vnet": partial(monai, "VNet", (1, 1, 32, 16, 16), in_channels=1, out_channels=2),
    "unet": partial(monai, "UNet", (2, 1, 48, 48, 48), **PLAIN, **CHANNELS, num_res_units=2),
    "unet-dropout": partial(
        monai, "UNet", (2, 1, 40, 40, 40), **PLAIN, **CHANNELS, norm="BATCH", dropout=0.2
    ),
    "attention-unet": partial(
        monai, "AttentionUnet", (1, 1, 32, 32, 32), **PLAIN, **CHANNELS, dropout=0.1
    ),
    "dynunet": partial(
        monai, "DynUNet", (1, 1, 32, 48, 48), **PLAIN, **DYNAMIC, filters=[16, 32, 64, 128]
    ),
    "dynunet-ds": partial(
        monai,
        "DynUNet",
        (1, 1, 32, 32, 32),
        **PLAIN,
        **DYNAMIC,
        filters=[16, 32, 64, 128],
        deep_supervision=True,
        deep_supr_num=2,
        res_block=True,
    ),
    "unetr": partial(
        monai,
        "UNETR",
        (1, 1, 48, 48, 48),
        in_channels=1,
        out_channels=2,
        img_size=48,
        feature_size=8,
        hidden_size=96,
        mlp_dim=192,
        num_heads=4,
        dropout_rate=0.1,
    ),
    "swin-unetr": partial(
        monai,
        "SwinUNETR",
        (1, 1, 64, 64, 32),
        in_channels=1,
        out_channels=2,
        feature_size=12,
        depths=[1] * 4,
    ),
    "highresnet": partial(monai, "HighResNet", (1, 1, 32, 32, 32)),
    "mednext": partial(
        monai, "MedNeXt", (1, 1, 32, 32, 32), **PLAIN, init_filters=16, kernel_size=3
    ),
    "resnet10-3d": partial(
        monai, "resnet10", (2, 1, 48, 48, 48), spatial_dims=3, n_input_channels=1, num_classes=2
    ),
    "regunet": partial(
        monai,
        "RegUNet",
        (1, 2, 48, 48, 48),
        spatial_dims=3,
        in_channels=2,
        num_channel_initial=8,
        depth=3,
    ),
    "voxelmorph": partial(monai, "VoxelMorph", ((1, 1, 32, 32, 32), (1, 1, 32, 32, 32))),
    "monai-diffusion": partial(
        monai,
        "DiffusionModelUNet",
        {"x": (1, 1, 24, 24, 24), "timesteps": below(1000, 1)},
        spatial_dims=3,
        in_channels=1,
        out_channels=1,
        channels=(32, 32, 64),
        attention_levels=(False, False, True),
        num_res_blocks=1,
        norm_num_groups=16,
    ),
    "vqvae": partial(
        monai,
        "VQVAE",
        (4, 1, 96, 96),
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        channels=(64, 128),
        num_res_layers=2,
        num_res_channels=(64, 128),
        downsample_parameters=((2, 4, 1, 1),) * 2,
        upsample_parameters=((2, 4, 1, 1, 0),) * 2,
        dropout=0.1,
    ),
    # images
    "basic-unet-pp": partial(
        monai,
        "BasicUNetPlusPlus",
        (1, 1, 96, 96),
        spatial_dims=2,
        in_channels=1,
        features=(16, 16, 32, 64, 128, 16),
        deep_supervision=True,
    ),
    "flexible-unet": partial(
        monai,
        "FlexibleUNet",
        (2, 3, 96, 96),
        in_channels=3,
        out_channels=2,
        backbone="efficientnet-b0",
    ),
    "densenet121": partial(
        monai,
        "DenseNet121",
        (2, 3, 96, 96),
        spatial_dims=2,
        in_channels=3,
        out_channels=10,
        dropout_prob=0.2,
    ),
    "seresnext50": partial(
        monai, "SEResNext50", (2, 3, 96, 96), spatial_dims=2, in_channels=3, num_classes=10
    ),
    "efficientnet-b0": partial(
        monai, "EfficientNetBN", (4, 3, 128, 128), model_name="efficientnet-b0", pretrained=False
    ),
    "patchgan": partial(
        monai,
        "MultiScalePatchDiscriminator",
        (2, 3, 128, 128),
        num_d=2,
        num_layers_d=3,
        spatial_dims=2,
        channels=16,
        in_channels=3,
        minimum_size_im=128,
    ),
    "var-autoencoder": partial(
        monai,
        "VarAutoEncoder",
        (4, 1, 64, 64),
        spatial_dims=2,
        in_shape=(1, 64, 64),
        out_channels=1,
        latent_size=64,
        channels=(32, 64, 128),
        strides=(1, 2, 2),
        num_res_units=2,
    ),
    "ahnet": partial(monai, "AHNet", (1, 1, 128, 128), spatial_dims=2, upsample_mode="bilinear"),
    "denoiser": partial(
        diffusers,
        "UNet2DModel",
        {"sample": (2, 3, 64, 64), "timestep": below(1000, 2)},
        sample_size=64,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ),
    "stable-diffusion": partial(
        diffusers,
        "UNet2DConditionModel",
        PROMPTED,
        **CONDITIONAL,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "controlnet": partial(
        diffusers,
        "ControlNetModel",
        {**PROMPTED, "controlnet_cond": (2, 3, 256, 256)},
        **CONDITIONAL,
    ),
    "unet3d-condition": partial(
        diffusers,
        "UNet3DConditionModel",
        {
            **PROMPTED,
            "sample": (1, 4, 4, 32, 32),
            "encoder_hidden_states": (1, 8, 32),
            "timestep": below(1000, 1),
        },
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    ),
    "stable-video": partial(
        diffusers,
        "UNetSpatioTemporalConditionModel",
        {
            "sample": (1, 4, 8, 32, 32),
            "timestep": below(1000, 1),
            "encoder_hidden_states": (1, 1, 32),
            "added_time_ids": (1, 3),
        },
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        layers_per_block=1,
        cross_attention_dim=32,
        num_attention_heads=(2, 4),
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=96,
    ),
    "autoencoder-kl": partial(
        diffusers,
        "AutoencoderKL",
        {"sample": (2, 3, 64, 64), "sample_posterior": lambda: True},
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=16,
    ),
    "autoencoder-tiny": partial(
        diffusers,
        "AutoencoderTiny",
        (2, 3, 96, 96),
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
    ),
    "vqmodel": partial(
        diffusers,
        "VQModel",
        (2, 3, 64, 64),
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=16,
    ),
    "autoencoder-wan": partial(
        diffusers, "AutoencoderKLWan", (1, 3, 5, 32, 32), base_dim=16, z_dim=8
    ),
    "autoencoder-cogvideox": partial(
        diffusers,
        "AutoencoderKLCogVideoX",
        (1, 3, 5, 32, 32),
        block_out_channels=(16, 32, 32, 32),
        norm_num_groups=8,
        layers_per_block=1,
        sample_height=32,
        sample_width=32,
    ),
    "convnext": partial(
        transformers,
        "ConvNextModel",
        {"pixel_values": (4, 3, 128, 128)},
        hidden_sizes=[48, 96, 192, 384],
        depths=[2, 2, 4, 2],
        drop_path_rate=0.1,
    ),
    "convnextv2": partial(
        transformers,
        "ConvNextV2Model",
        {"pixel_values": (4, 3, 128, 128)},
        hidden_sizes=[48, 96, 192, 384],
        depths=[2, 2, 4, 2],
    ),
    "regnet": partial(
        transformers,
        "RegNetModel",
        {"pixel_values": (4, 3, 128, 128)},
        hidden_sizes=[48, 96, 192, 384],
        depths=[1, 2, 4, 2],
        groups_width=24,
    ),
    "mobilenetv2": partial(transformers, "MobileNetV2Model", {"pixel_values": (2, 3, 160, 160)}),
    "mobilevit": partial(
        transformers, "MobileViTModel", {"pixel_values": (2, 3, 128, 128)}, image_size=128
    ),
    "bit": partial(
        transformers,
        "BitModel",
        {"pixel_values": (2, 3, 128, 128)},
        embedding_size=64,
        hidden_sizes=[128, 256, 512, 1024],
        depths=[1, 1, 2, 1],
        num_groups=16,
    ),
    "swin": partial(
        transformers,
        "SwinModel",
        {"pixel_values": (2, 3, 112, 112)},
        image_size=112,
        embed_dim=48,
        depths=[2, 2, 2],
        num_heads=[2, 4, 8],
    ),
    "segformer": partial(
        transformers, "SegformerForSemanticSegmentation", {"pixel_values": (2, 3, 128, 128)}
    ),
    "cvt": partial(
        transformers,
        "CvtModel",
        {"pixel_values": (4, 3, 128, 128)},
        embed_dim=[32, 64, 128],
        num_heads=[1, 2, 4],
        depth=[1, 2, 4],
    ),
    "levit": partial(transformers, "LevitModel", {"pixel_values": (2, 3, 224, 224)}),
    "dpt": partial(
        transformers,
        "DPTForDepthEstimation",
        {"pixel_values": (1, 3, 128, 128)},
        **SMALL,
        image_size=128,
        intermediate_size=384,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[48, 96, 192, 192],
        fusion_hidden_size=64,
    ),
    "swin2sr": partial(
        transformers,
        "Swin2SRForImageSuperResolution",
        {"pixel_values": (1, 3, 32, 32)},
        embed_dim=60,
        depths=[2, 2],
        num_heads=[6, 6],
    ),
    # Some of these read values in forward.
    "detr": partial(
        with_resnet, "DetrModel", {"pixel_values": (4, 3, 256, 256)}, ("stage4",), **DETECTOR
    ),
    "deformable-detr": partial(
        with_resnet,
        "DeformableDetrModel",
        {"pixel_values": (2, 3, 160, 160)},
        ("stage2", "stage3", "stage4"),
        **DETECTOR,
    ),
    "mask2former": partial(mask2former, 2, 3, 160, 160),
    "encodec": partial(transformers, "EncodecModel", {"input_values": (1, 1, 12000)}),
    "mixtral": partial(
        transformers,
        "MixtralModel",
        {"input_ids": below(1000, 2, 64)},
        **SMALL,
        num_key_value_heads=2,
        intermediate_size=384,
        vocab_size=1000,
    ),
    # sounds and sequences
    "oobleck": partial(
        diffusers,
        "AutoencoderOobleck",
        {"sample": (1, 2, 8192), "sample_posterior": lambda: True},
        encoder_hidden_size=32,
        decoder_channels=32,
        decoder_input_channels=16,
        channel_multiples=[1, 2, 4, 4, 8],
    ),
    "unet1d": partial(
        diffusers,
        "UNet1DModel",
        ((1, 2, 4096), below(1000, 1)),
        sample_size=4096,
        block_out_channels=(32, 32, 64),
        extra_in_channels=64,
    ),
    "dac": partial(
        transformers,
        "DacModel",
        {"input_values": (1, 1, 8192)},
        encoder_hidden_size=32,
        decoder_hidden_size=512,
    ),
    "mimi": partial(
        transformers,
        "MimiModel",
        {"input_values": (1, 1, 9600)},
        **SMALL,
        num_filters=32,
        intermediate_size=384,
        upsample_groups=192,
        num_key_value_heads=4,
    ),
    "hifigan": partial(
        transformers, "SpeechT5HifiGan", {"spectrogram": (1, 24, 80)}, upsample_initial_channel=256
    ),
    "univnet": partial(transformers, "UnivNetModel", {"input_features": (1, 20, 100)}),
    "wav2vec2": partial(transformers, "Wav2Vec2Model", (2, 16000), **SPEECH),
    "wavlm": partial(
        transformers, "WavLMModel", (1, 16000), **SPEECH, apply_spec_augment=False, layerdrop=0.0
    ),
    "whisper": partial(
        transformers,
        "WhisperModel",
        {"input_features": (4, 80, 400), "decoder_input_ids": below(1000, 4, 16)},
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=200,
        vocab_size=1000,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "mamba": partial(
        transformers,
        "MambaModel",
        {"input_ids": below(1000, 2, 64)},
        hidden_size=128,
        num_hidden_layers=2,
        vocab_size=1000,
        use_cache=False,
    ),
}


def example(name: str) -> Example:
    """A network in training mode and its inputs, with the same values in every process."""
    torch.manual_seed(0)
    model, inputs = NETWORKS[name]()
    return model.train(), inputs
