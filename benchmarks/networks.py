"""Tiny networks of several kinds, all of one width, with tokenizers, images and texts."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import timm
import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor

import hf_stitch
from benchmarks import tiny
from hf_stitch import Adapter, Samples

CLASSES, SIDE, WIDTH, MOST = 5, 64, 32, 80
IMAGES = ("vit", "cnn")
KINDS: dict[str, Any] = {
    "vit": hf.ViTForImageClassification, "bert": hf.BertForSequenceClassification,
    "roberta": hf.RobertaForSequenceClassification, "encoder": hf.BertModel, "gpt2": hf.GPT2LMHeadModel,
    "letters": hf.GPT2LMHeadModel, "llama": hf.LlamaForCausalLM,
}  # fmt: skip
"""Kind -> class, except ``cnn``. ``letters`` has a tokenizer of characters."""
WORDS = [f"{a}{b}" for a in ("to", "ka", "mi", "ru", "se") for b in ("lan", "do", "vi", "pe")]


def images(n: int = MOST, seed: int = 0) -> Tensor:
    """Draw images, each with the motif of its class."""
    draw = torch.Generator().manual_seed(seed)
    motifs = torch.randn(CLASSES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(9))
    return torch.randn(n, 3, SIDE, SIDE, generator=draw) + 2 * motifs[torch.arange(n) % CLASSES]


def texts(n: int = MOST, seed: int = 0) -> list[str]:
    """Draw texts of 2 to 9 words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(n)]


@cache
def data(kind: str = "vit", n: int = MOST, seed: int = 0) -> Samples:
    """Draw images or texts for a kind of network, with labels."""
    return Samples.of((images if kind in IMAGES else texts)(n, seed), label=[i % CLASSES for i in range(n)])


@cache
def tokenizer(letters: bool = False) -> Any:
    """Build a tokenizer of whole words, or of characters."""
    pieces = sorted({letter for word in WORDS for letter in word} | {" "}) if letters else WORDS
    vocabulary = {piece: index for index, piece in enumerate(["<pad>", "<s>", "</s>", "<unk>", *pieces])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated") if letters else pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=core, **names)


def build(kind: str, seed: int = 0) -> Adapter:
    """Build a tiny network with random weights, and load it."""
    with torch.random.fork_rng():  # later draws must not depend on whether a network is built or cached
        torch.manual_seed(seed)
        if kind == "cnn":
            model = timm.create_model("resnet10t", num_classes=CLASSES, channels=(16, 24, 32, 48))
        else:
            config = tiny.config({"encoder": "bert", "letters": "gpt2"}.get(kind, kind))
            config.num_labels, config.hidden_size = CLASSES, WIDTH
            model = KINDS[kind](config)
    model = tiny.shaken(model)
    text_options: Any = {"processor": tokenizer(kind == "letters")}
    adapter = hf_stitch.load(model, **({"example_inputs": images(2)} if kind in IMAGES else text_options))
    head: Any = list(model.modules())[-1]
    if getattr(head, "out_features", 0) == CLASSES:  # the network must not predict one class for all samples
        with torch.no_grad():
            output = adapter.forward(adapter.preprocess(list((images if kind in IMAGES else texts)(20))))
            head.bias -= getattr(output, "logits", output).mean(0)
    return adapter


net = cache(build)
