"""Tiny networks and data for the examples: they train within seconds, on handwritten digits and generated sentences."""

from functools import cache
from itertools import product

import numpy as np
import timm
import torch
from hf_stitch_towers import ImageAndTextProcessor
from PIL.Image import Image, fromarray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

import hf_stitch
from hf_stitch import Adapter, Samples
from hf_stitch.data import read_data

SIZE = 16
SENTENCES = [
    f"{who} {verb} {where}."
    for who, verb, where in product(
        ("She", "The walker", "An unbelievably fast horse", "A blacksmith"),
        ("walked", "is walking", "ran quickly and jumped", "came back"),
        ("home", "along the river", "to the market", "through the old forest"),
    )
]


@cache
def digits(split: str = "train") -> Samples:
    """Return images of handwritten digits, with labels: the splits ``train`` (1,438) and ``test`` (359)."""
    return Samples.of(read_data("sklearn:digits", split=split))


def images(n: int) -> list[Image]:
    """Return the first test images."""
    return next(iter(digits("test").batches(n))).samples


def noise(n: int = 100) -> list[Image]:
    """Return images of noise instead of digits."""
    return [fromarray(pixels) for pixels in np.random.default_rng(0).integers(0, 256, (n, 8, 8), dtype=np.uint8)]


@cache
def cnn(seed: int = 0) -> Adapter:
    """Return a trained ResNet of timm with four stages."""
    torch.manual_seed(seed)
    config = {"input_size": (1, SIZE, SIZE), "crop_pct": 1.0, "mean": (0.5,), "std": (0.5,)}
    shape = {"channels": (8, 16, 32, 32), "stem_width": 8, "in_chans": 1, "num_classes": 10}
    return fitted(hf_stitch.load(timm.create_model("resnet10t", pretrained_cfg_overlay=config, **shape)))


@cache
def vit(seed: int = 0) -> Adapter:
    """Return a trained vision transformer of transformers with four blocks."""
    return fitted(untrained_vit(seed))


def untrained_vit(seed: int = 0) -> Adapter:
    """Return the same transformer with random weights."""
    torch.manual_seed(seed)
    body = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    config = ViTConfig(**body, image_size=SIZE, patch_size=8, num_channels=1, num_labels=10)
    processor = ViTImageProcessor(size={"height": SIZE, "width": SIZE}, image_mean=[0.5], image_std=[0.5])
    return hf_stitch.load(ViTForImageClassification(config), processor=processor)


def fitted(network: Adapter, epochs: int = 6) -> Adapter:
    """Train a classifier on 800 digits."""
    samples = digits().take(800)
    inputs, labels = pixels(network, samples), torch.tensor(samples.labels)
    optimizer = torch.optim.AdamW(network.model.parameters(), lr=3e-3)
    network.model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(32):
            output = network.model(inputs[batch])
            loss = torch.nn.functional.cross_entropy(getattr(output, "logits", output), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.model.eval()
    return network


def pixels(network: Adapter, samples: Samples) -> torch.Tensor:
    """Return all images, preprocessed for a network."""
    return torch.cat([next(iter(network.preprocess(batch.samples).values())) for batch in samples.batches(256)])


@cache
def decoder(pieces: int = 300, width: int = 32) -> Adapter:
    """Return a small GPT-2 and its tokenizer with ``pieces`` tokens, trained on the sentences."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=pieces, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<end>", eos_token="<end>")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=width, n_layer=2, n_head=4, n_positions=64,
                   bos_token_id=0, eos_token_id=0)
    )  # fmt: skip
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    batch["labels"] = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return hf_stitch.load(model.eval(), processor=tokenizer)


NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@cache
def captioner() -> Adapter:
    """Return a captioner that writes "this is a three": the encoder of a ViT, and a GPT-2 trained on it."""
    words = ["<pad>", "<s>", "</s>", "this", "is", "a", *NUMBERS]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(words), n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2,
        add_cross_attention=True, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = VisionEncoderDecoderModel(encoder=vit().model.vit, decoder=GPT2LMHeadModel(config))
    model.generation_config.update(decoder_start_token_id=1, eos_token_id=2, pad_token_id=0)
    samples = digits().take(800)
    taught(model, pixels(vit(), samples), samples.labels, model.decoder.parameters())
    return hf_stitch.load(model.eval(), processor=ImageAndTextProcessor(vit().processor, tokenizer))


def taught(model, inputs, labels, parameters, epochs=100, patience=4):
    """Train parameters of a captioner with early stopping on a fifth of the images."""
    first = model.config.decoder.vocab_size - len(NUMBERS)  # <pad> <s> </s> this is a, then the numbers
    captions = torch.tensor([[1, 3, 4, 5, first + label, 2] for label in labels])
    parameters, train_size = list(parameters), len(captions) * 4 // 5
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    best, best_weights, epochs_without_gain = float("inf"), [], 0

    def loss(rows):
        logits = model(pixel_values=inputs[rows], decoder_input_ids=captions[rows, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.mT, captions[rows, 1:])

    for _ in range(epochs):
        for rows in torch.randperm(train_size).split(32):
            loss(rows).backward(inputs=parameters)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            validation = float(loss(slice(train_size, None)))
        if validation < best:
            best, best_weights = validation, [weight.detach().clone() for weight in parameters]
            epochs_without_gain = 0
        elif (epochs_without_gain := epochs_without_gain + 1) == patience:
            break
    with torch.no_grad():
        for weight, best_weight in zip(parameters, best_weights, strict=True):
            weight.copy_(best_weight)
