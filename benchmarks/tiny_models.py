"""Tiny random models of many architectures, with batches of labeled inputs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

COUNT, WORDS, LENGTH, CLASSES, PIXELS = 3, 11, 5, 3, 16
Inputs = dict[str, Tensor]
Built = tuple[nn.Module, Inputs]

# Names of options differ between authors; those that a configuration does not know have no effect.
TEXT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
    "max_position_embeddings": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "image_size": PIXELS, "patch_size": 8, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 12, "num_labels": CLASSES,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 1, "head_dim": 4}
ENCODER_DECODER = {
    "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12, "decoder_ffn_dim": 12,
}  # fmt: skip


def draw_tokens(count: int, length: int = LENGTH) -> Inputs:
    """Return tokens, the last of which are padding for one of them."""
    ids = torch.randint(3, WORDS, (count, length))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": torch.where(mask == 1, ids, 0), "attention_mask": mask}


def make_causal(kind: str, **options: Any) -> Callable[..., Built]:
    """Return a builder of a causal language model."""

    def build(count: int = COUNT, length: int = LENGTH, **others: Any) -> Built:
        config = getattr(transformers, f"{kind}Config")(**{**TEXT, **options, **others})
        model = getattr(transformers, f"{kind}ForCausalLM", None) or getattr(transformers, f"{kind}LMHeadModel")
        inputs = draw_tokens(count, length)
        return model(config), {**inputs, "labels": inputs["input_ids"].where(inputs["attention_mask"] == 1, -100)}

    return build


def make_classifier(kind: str, **options: Any) -> Callable[..., Built]:
    """Return a builder of a classifier of texts."""

    def build(count: int = COUNT, length: int = LENGTH, **others: Any) -> Built:
        config = getattr(transformers, f"{kind}Config")(**{**TEXT, "num_labels": CLASSES, **options, **others})
        model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
        return model, {**draw_tokens(count, length), "labels": torch.randint(CLASSES, (count,))}

    return build


def make_translator(kind: str, **options: Any) -> Callable[..., Built]:
    """Return a builder of an encoder-decoder."""

    def build(count: int = COUNT, length: int = LENGTH, **others: Any) -> Built:
        config = getattr(transformers, f"{kind}Config")(**{**TEXT, "decoder_start_token_id": 1, **options, **others})
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
        return model, {**draw_tokens(count, length), "labels": torch.randint(3, WORDS, (count, length - 1))}

    return build


def make_vision(kind: str, **options: Any) -> Callable[..., Built]:
    """Return a builder of a classifier of images."""

    def build(count: int = COUNT, **others: Any) -> Built:
        chosen = {key: value for key, value in {**IMAGE, **options, **others}.items() if value is not None}
        config = getattr(transformers, f"{kind}Config")(**chosen)
        model = getattr(transformers, f"{kind}ForImageClassification")(config)
        return model, draw_images(count, config.image_size)

    return build


def make_speech(count: int = COUNT) -> Built:
    """Return a classifier of sounds."""
    options = {"conv_dim": (4, 4), "conv_kernel": (8, 3), "conv_stride": (4, 2), "num_feat_extract_layers": 2}
    config = transformers.Wav2Vec2Config(
        **{**TEXT, **options}, num_labels=CLASSES, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        classifier_proj_size=4,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    return model, {"input_values": torch.randn(count, 80), "labels": torch.randint(CLASSES, (count,))}


def draw_images(count: int, pixels: int = PIXELS) -> Inputs:
    """Return random images and classes."""
    return {"pixel_values": torch.randn(count, 3, pixels, pixels), "labels": torch.randint(CLASSES, (count,))}


class MixerBlock(nn.Module):
    """Two networks in a row: along the patches, and along the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.along_patches = nn.Sequential(nn.Linear(patches, 6), nn.GELU(), nn.Linear(6, patches))
        self.along_channels = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        mixed: Tensor = x + self.along_patches(first(x).mT).mT
        return mixed + self.along_channels(second(mixed))  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """An MLP-Mixer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(MixerBlock(4, width), MixerBlock(4, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.patches(x).flatten(2).mT)).mean(1))
        return logits


class Classifier(nn.Module):
    """A network that returns a loss for labels, as transformers' models do."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.network(pixel_values)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def make_network(module: str, name: str, pixels: int = PIXELS, **options: Any) -> Callable[..., Built]:
    """Return a builder of a classifier of images of torchvision or timm."""

    def build(count: int = COUNT) -> Built:
        return Classifier(getattr(import_module(module), name)(num_classes=CLASSES, **options)), draw_images(
            count, pixels
        )

    return build


def make_mixture(implementation: str) -> Callable[..., Built]:
    """Return a builder of a classifier whose experts are one parameter of three axes."""
    build = make_classifier("Mixtral", **GROUPED, num_local_experts=3, num_experts_per_tok=2)

    def choose(count: int = COUNT) -> Built:
        model: Any
        model, inputs = build(count)
        model.set_experts_implementation(implementation)
        return model, inputs

    return choose


def make_low_rank(count: int = COUNT) -> Built:
    """Return GPT-2 with low-rank adapters, the only parameters that are trained."""
    import peft

    model, inputs = make_causal("GPT2")(count)
    targets = ["c_attn", "c_proj", "c_fc"]
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=True)), inputs


DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 4,
    "max_relative_positions": 4,
}
SWIN = {
    "patch_size": 2, "embed_dim": 4, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "hidden_size": None,
    "num_attention_heads": None,
}  # fmt: skip
TIMM_VIT: dict[str, Any] = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 2}
TIMM_SWIN: dict[str, Any] = {
    "img_size": PIXELS, "patch_size": 2, "embed_dim": 4, "depths": (2, 2), "num_heads": (2, 2), "window_size": 2,
}  # fmt: skip
TIMM_MIXER: dict[str, Any] = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 8, "num_blocks": 2}
TORCHVISION_VIT: dict[str, Any] = {
    "image_size": PIXELS, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 12,
}  # fmt: skip
TORCHVISION_SWIN: dict[str, Any] = {
    "patch_size": [2, 2], "embed_dim": 4, "depths": [2, 2], "num_heads": [2, 2], "window_size": [2, 2],
}  # fmt: skip
MAXVIT: dict[str, Any] = {
    "input_size": (PIXELS, PIXELS), "stem_channels": 4, "partition_size": 2, "block_channels": [4, 8],
    "block_layers": [1, 1], "head_dim": 4, "stochastic_depth_prob": 0.0,
}  # fmt: skip
DENSENET: dict[str, Any] = {"growth_rate": 2, "block_config": (1, 2), "num_init_features": 4, "bn_size": 2}
ARCHITECTURES: dict[str, Callable[..., Built]] = {
    "BERT": make_classifier("Bert"),
    "RoBERTa": make_classifier("Roberta"),
    "DistilBERT": make_classifier("DistilBert", dim=8, n_layers=2, n_heads=2, hidden_dim=12),
    "ALBERT": make_classifier("Albert", embedding_size=4),
    "ELECTRA": make_classifier("Electra", embedding_size=4),
    "DeBERTa": make_classifier("DebertaV2", **DEBERTA),
    "GPT-2": make_causal("GPT2"),
    "GPT-2 with LoRA": make_low_rank,
    "GPT-NeoX": make_causal("GPTNeoX"),
    "OPT": make_causal("OPT", ffn_dim=12, word_embed_proj_dim=8),
    "BLOOM": make_causal("Bloom", n_layer=2, n_head=2),
    "Llama": make_causal("Llama", **GROUPED),
    "Qwen2": make_causal("Qwen2", **GROUPED),
    "Mistral": make_causal("Mistral", **GROUPED),
    "Gemma": make_causal("Gemma", **GROUPED),
    "Phi": make_causal("Phi"),
    # The default, "grouped_mm", has no float64.
    "Mixtral, batched_mm": make_mixture("batched_mm"),
    "Mixtral, eager": make_mixture("eager"),
    "Mamba": make_causal("Mamba", state_size=4, time_step_rank=2),
    "T5": make_translator("T5", d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2),
    "BART": make_translator("Bart", **ENCODER_DECODER),
    "ViT": make_vision("ViT"),
    "DeiT": make_vision("DeiT"),
    "BEiT": make_vision("Beit", use_relative_position_bias=True, use_shared_relative_position_bias=False),
    "Swin": make_vision("Swin", **SWIN),
    "ConvNeXt": make_vision("ConvNext", hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, patch_size=4),
    "MLP-Mixer": lambda count=COUNT: (Classifier(Mixer()), draw_images(count)),
    "ResNet": make_vision("ResNet", embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic"),
    "MobileNetV2": make_vision("MobileNetV2", depth_multiplier=0.1),
    "Wav2Vec2": make_speech,
    "ViT (timm)": make_network("timm.models.vision_transformer", "VisionTransformer", **TIMM_VIT),
    "DeiT (timm)": make_network("timm.models.deit", "VisionTransformerDistilled", **TIMM_VIT),
    "CaiT (timm)": make_network("timm.models.cait", "Cait", **TIMM_VIT, depth_token_only=1, init_values=0.1),
    "EVA-02 (timm)": make_network("timm.models.eva", "Eva", **TIMM_VIT, use_rot_pos_emb=True, swiglu_mlp=True),
    "Swin (timm)": make_network("timm.models.swin_transformer", "SwinTransformer", **TIMM_SWIN),
    "Swin V2 (timm)": make_network("timm.models.swin_transformer_v2", "SwinTransformerV2", **TIMM_SWIN),
    "ConvNeXt (timm)": make_network("timm.models.convnext", "ConvNeXt", 32, depths=(1, 1, 1, 1), dims=(4, 4, 8, 8)),
    "MLP-Mixer (timm)": make_network("timm.models.mlp_mixer", "MlpMixer", **TIMM_MIXER),
    "ViT (torchvision)": make_network("torchvision.models.vision_transformer", "VisionTransformer", **TORCHVISION_VIT),
    "Swin (torchvision)": make_network("torchvision.models.swin_transformer", "SwinTransformer", **TORCHVISION_SWIN),
    "MaxViT (torchvision)": make_network("torchvision.models.maxvit", "MaxVit", **MAXVIT),
    "DenseNet (torchvision)": make_network("torchvision.models.densenet", "DenseNet", 32, **DENSENET),
}
WIDE_TEXT = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "num_hidden_layers": 3, "d_model": 64,
    "d_kv": 16, "d_ff": 256, "num_layers": 3, "num_heads": 4, "ffn_dim": 256, "word_embed_proj_dim": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
WIDE_IMAGE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "image_size": 32,
}
# Sizes at which a pass takes longer than its Python code.
TIMED: dict[str, tuple[int, dict[str, Any]]] = {
    "OPT": (16, {"length": 32, **WIDE_TEXT}),
    "T5": (16, {"length": 32, **WIDE_TEXT}),
    "DeBERTa": (16, {"length": 32, **WIDE_TEXT}),
    "ViT": (16, {**WIDE_IMAGE, "patch_size": 4}),
    "DeiT": (16, {**WIDE_IMAGE, "patch_size": 4}),
    "Swin": (16, {"image_size": 32, "embed_dim": 32, "num_heads": [2, 4], "window_size": 4}),
    "ConvNeXt": (16, {"image_size": 32, "hidden_sizes": [32, 64], "depths": [2, 2]}),
}


def build(name: str, count: int = COUNT, **options: Any) -> Built:
    """Return a model in float64 with random weights, and a batch."""
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name](count, **options)
    model = model.double().eval()
    with torch.no_grad():
        for each in model.parameters():  # many are initialized to zero, one or very small numbers
            each.add_(0.1 * torch.randn_like(each))
    return model, {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
