"""Tiny random networks of the families that must have exact cuts, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

BODY: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT: dict[str, Any] = {**BODY, "vocab_size": 100}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 100, **ENDS}
T5: dict[str, Any] = {"d_model": 32, "num_layers": 3, "num_heads": 4, "d_ff": 64, "d_kv": 8, "vocab_size": 100}
VIT: dict[str, Any] = {**BODY, "image_size": 32, "patch_size": 8}
SPEECH: dict[str, Any] = {
    **BERT,
    **{"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
}


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Code(nn.Module):
    """User code: some modules, and a function that receives the network and its input."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.run = run
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


class FlatNet(nn.Module):
    """User code without a stack of blocks, where an in-place ReLU overwrites the output of each BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, 2), nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        x = torch.relu_(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


TEXT: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT)),
    "roberta": lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**BERT, max_position_embeddings=40)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "gpt2-classifier": lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**BERT, num_key_value_heads=2)),
    "t5-encoder": lambda: hf.T5EncoderModel(hf.T5Config(**T5)),
}
IMAGE: dict[str, Callable[[], nn.Module]] = {
    "hf-vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**VIT)),
    "hf-resnet": lambda: hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 24], depths=[1, 2, 1], layer_type="basic")
    ),
    "timm-vit": lambda: timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, embed_dim=48, num_heads=3
    ),
    "timm-deit-distilled": lambda: timm.create_model(
        "deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, depth=3, embed_dim=48, num_heads=3
    ),
    "timm-swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4)
    ),
    "timm-convnext": lambda: timm.create_model("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)),
    "timm-resnet": lambda: timm.create_model("resnet10t"),
    "timm-rexnet": lambda: timm.create_model("rexnet_100", width_mult=0.25, depth_mult=0.3),
    "user-code": FlatNet,
}
LAYERS = {
    "bert": ("bert.encoder.layer.0", "bert.encoder.layer.1", "bert.encoder.layer.2"),
    "gpt2": ("transformer.h.0", "transformer.h.1", "transformer.h.2"),
    "llama": ("model.layers.0", "model.layers.1", "model.layers.2"),
    "t5-encoder": ("encoder.block.0", "encoder.block.1", "encoder.block.2"),
    "hf-vit": ("vit.layers.0", "vit.layers.1", "vit.layers.2"),
    "timm-swin": ("layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0", "layers.1.blocks.1"),
    "timm-resnet": ("layer1.0", "layer2.0", "layer3.0", "layer4.0"),
    "user-code": ("conv1", "bn1", "conv2", "bn2"),
}
"""The expected layers of some families."""

SPECS = {
    "bert": "bnd 32", "hf-vit": "bnd 32 4x4 +1", "timm-deit-distilled": "bnd 48 4x4 +2", "timm-swin": "bhwc 24 8x8",
    "timm-convnext": "bchw 8 8x8", "hf-resnet": "bchw 8 8x8", "user-code": "bchw 8 30x30",
}  # fmt: skip
"""The expected spec of the first layer of some families."""


def make(name: str) -> nn.Module:
    """Return the network of a family with random weights, BatchNorm statistics and BatchNorm scales."""
    torch.manual_seed(0)
    model = {**TEXT, **IMAGE}[name]()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
                module.weight.normal_(1, 0.1)
    return model.eval()


def texts(batch: int, tokens: int, padded: str = "", seed: int = 0) -> dict[str, Tensor]:
    """Return token ids and mask: random lengths with padding ``left`` or ``right``, or all of one length."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 100, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        lengths = torch.randint(1, tokens + 1, (batch, 1), generator=generator)
        lengths[0] = tokens
        mask = (torch.arange(tokens) < lengths).long()
        mask = mask.flip(1) if padded == "left" else mask
    return {"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask}


def images(batch: int, size: int = 32, channels: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(seed))
