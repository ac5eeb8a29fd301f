"""Tiny networks, tokenizers and samples for the fixtures: hidden size 8, about 40 tokens.

The weights depend on the version of the libraries. Fixtures therefore contain the networks that a test needs again.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn

import hf_stitch
from hf_stitch import Adapter, Samples

FIXTURES = Path(__file__).with_name("fixtures")
EXACT = FIXTURES.parent / "exact_outputs.safetensors"
"""Outputs in float64, because those in float32 depend on the processor; ``make_fixtures.py`` computes them."""
TINY = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
WORDS = [f"w{i}" for i in range(36)]
SPECIALS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYER = {
    "bert": "bert.encoder.layer.0",
    "gpt2": "transformer.h.0",
    "llama": "model.layers.0",
    "t5": "encoder.block.0",
    "vit": "vit.layers.0",
}
"""The layer at which each family is cut."""


def networks() -> tuple[Adapter, Adapter]:
    """Build two networks of user code, for a stitcher; kernels of processors draw different weights from a seed."""
    nets, saved = [], load_file(Path(__file__).with_name("networks.safetensors"))
    for place in "01":
        nets.append(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
        nets[-1].load_state_dict({name[2:]: value for name, value in saved.items() if name[0] == place})
    a, b = (hf_stitch.load(net, example_inputs=torch.zeros(2, 4)) for net in nets)
    return a, b


def rows(n: int, width: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def points(n: int = 120, seed: int = 0) -> Samples:
    drawn = rows(n, seed=seed)
    return Samples.of(drawn, label=[int(x > 0) + int(y > 0) for x, y in drawn[:, :2].tolist()])


def classifiers() -> list[Adapter]:
    """Build three deeper networks of user code, whose outputs are the logits of three classes."""
    nets = []
    for seed in range(3):
        torch.manual_seed(seed)
        nets.append(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)))
    return [hf_stitch.load(net, example_inputs=torch.zeros(2, 4)) for net in nets]


def images(size: int = 4) -> list[dict[str, Any]]:
    pictures = torch.randn(60, 1, size, size, generator=torch.Generator().manual_seed(0))
    return [{"image": picture, "label": i % 3} for i, picture in enumerate(pictures)]


def texts() -> list[dict[str, Any]]:
    """Draw labelled texts of 2 to 8 words."""
    draw = random.Random(0)
    return [{"text": " ".join(draw.choices(WORDS, k=draw.randint(2, 8))), "label": i % 3} for i in range(60)]


def vit(seed: int = 0) -> Adapter:
    torch.manual_seed(seed)
    config = transformers.ViTConfig(**TINY, image_size=4, patch_size=2, num_channels=1, num_labels=3)
    return hf_stitch.load(transformers.ViTForImageClassification(config).eval())


def timm_vit() -> Adapter:
    torch.manual_seed(2)
    sizes = {"img_size": 4, "patch_size": 2, "embed_dim": 8, "depth": 2, "num_heads": 2, "mlp_ratio": 1.0}
    model = timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=3, **sizes).eval()
    return hf_stitch.load(model, example_inputs=torch.zeros(2, 1, 4, 4))


def resnet(seed: int = 0) -> Any:
    """Build a classifier of images with convolutions, without an adapter."""
    torch.manual_seed(seed)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(**sizes, num_channels=1, num_labels=3)
    ).eval()


def words() -> Any:
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIALS, *WORDS])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "cls_token", "sep_token", "unk_token"), SPECIALS, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def bert(seed: int = 0, kind: str = "BertForSequenceClassification") -> Adapter:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        **TINY, vocab_size=40, max_position_embeddings=32, num_labels=3, initializer_range=0.3
    )
    return hf_stitch.load(getattr(transformers, kind)(config).eval(), processor=words())


def t5() -> Adapter:
    """Build the encoder of T5, with the attention that all versions of transformers have."""
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, vocab_size=40)
    config._attn_implementation = "eager"
    return hf_stitch.load(transformers.T5EncoderModel(config).eval(), processor=words())


def gpt2(seed: int = 0, processor: Any = None) -> Adapter:
    """Build GPT-2 with the tokenizer of words, or another one. It does not like to repeat itself."""
    torch.manual_seed(seed)
    processor = processor or words()
    config = transformers.GPT2Config(
        n_embd=8, n_layer=2, n_head=2, n_positions=64, vocab_size=len(processor), initializer_range=0.3, **ENDS
    )
    network = transformers.GPT2LMHeadModel(config).eval()
    network.generation_config.repetition_penalty = 1.5
    return hf_stitch.load(network, processor=processor)


def llama(seed: int = 1, processor: Any = None) -> Adapter:
    """Build Llama with the tokenizer of words, or another one. Its generation config has values of its own."""
    torch.manual_seed(seed)
    processor = processor or words()
    config = transformers.LlamaConfig(
        **TINY, num_key_value_heads=1, max_position_embeddings=64, vocab_size=len(processor), initializer_range=0.3,
        **ENDS,
    )  # fmt: skip
    network = transformers.LlamaForCausalLM(config).eval()
    network.generation_config.max_new_tokens = 5
    network.generation_config.repetition_penalty = 1.5
    return hf_stitch.load(network, processor=processor)


SENTENCES = [
    f"{who} {verb} {where}"
    for who in ("she", "the walker", "a horse", "he")
    for verb in ("walked", "is walking", "walks", "ran")
    for where in ("home", "away", "to the river", "along the road")
]
LETTERS = sorted(set("".join(SENTENCES)) - {" "})


def fine() -> Any:
    vocabulary = {piece: i for i, piece in enumerate(["<pad>", "<s>", "<end>", "<unk>", "▁", *LETTERS])}
    return _of_pieces(Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>")), eos_token="<end>")


def coarse() -> Any:
    found = sorted({f"▁{word}" for sentence in SENTENCES for word in sentence.split()})
    scored = [(piece, -2.0) for piece in found] + [(piece, -9.0) for piece in ("▁", *LETTERS)]
    specials = [("<pad>", 0.0), ("<s>", 0.0), ("<end>", 0.0), ("<unk>", -20.0)]
    made = Tokenizer(models.Unigram([*specials, *scored], unk_id=3))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _of_pieces(made, bos_token="<s>")


def _of_pieces(made: Tokenizer, **names: str) -> Any:
    """Finish a tokenizer of pieces, of which each word has one that begins with ``▁``."""
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", **names)
