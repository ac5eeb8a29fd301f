"""Networks of many blocks, trained here on public data, from which benchmarks remove blocks.

Usage: python -m benchmarks.deep_networks [NAME ...]

A Llama of bytes, and a GPT-2 and a Qwen2 of pieces of words, write English; a BERT encodes sentences so that English
ones are near their Spanish and French translations; a ViT classifies CIFAR-10. Each is trained once, in some minutes of
one thread, and kept in a temporary folder as ``save_pretrained`` writes it. With each come raw samples that it was not
trained on: a pool to calibrate with, a test, and samples of another domain. Data are read from the folder
``HF_STITCH_SHARED``, by default ``../shared``. Install the plugin ``hf-stitch-versions``.
"""

from __future__ import annotations

import importlib.util
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional

from benchmarks.diff import SHARED, train
from benchmarks.timing import machine

KEPT = Path(tempfile.gettempdir()) / "hf-stitch-benchmark-shorten"

LENGTH, TEST, HELD_OUT = 128, 400, 2_400
"""Most tokens of a text, samples of a test, and texts not trained on: those of the test first, the others calibrate."""


@dataclass(frozen=True)
class Deep:
    """A trained network, and raw samples that it was not trained on: texts, or dictionaries of an image and a label."""

    name: str
    folder: Path
    model: Any
    processor: Any
    calibration: list[Any]
    test: list[Any]
    other: list[Any]  # another domain: Spanish tweets, or images of CIFAR-100 without labels


def column(name: str, place: str) -> list[str]:
    """Read a column of all files that a pattern names."""
    return [x for path in sorted((SHARED / "data").glob(place)) for x in pq.read_table(path)[name].to_pylist()]


def images(place: str, start: int, count: int) -> list[dict[str, Any]]:
    """Read images, and their classes if the data have one column of them."""
    return [
        {"image": Image.open(BytesIO(row["img"]["bytes"])).convert("RGB")} | {x: row[x] for x in row if x == "label"}
        for row in pq.read_table(SHARED / "data" / place).slice(start, count).to_pylist()
    ]


def paragraphs(sentences: Iterable[str], size: int) -> list[str]:
    """Join sentences until each text has as many characters; leave out those that repeat."""
    texts, now = [], ""
    for sentence in dict.fromkeys(sentences):
        now = f"{now} {sentence.strip()}".strip()
        if len(now) >= size:
            texts.append(now)
            now = ""
    return texts


def english(size: int) -> list[str]:
    """Return English questions, tweets, everyday sentences and news, in a fixed random order."""
    tweets, news = column("text", "tweet*/english/*.parquet"), column("en", "ntrex128/*.parquet")
    sources = column("text", "trec/*.parquet"), tweets, [row[0] for row in translations()], news
    texts = list(dict.fromkeys(text for source in sources for text in paragraphs(source, size)))
    random.Random(0).shuffle(texts)
    return texts


def translations() -> list[tuple[str, ...]]:
    """Return everyday sentences in English, Spanish and French, in a fixed random order."""
    rows = list(zip(*(column(name, "tatoeba*/*.parquet") for name in ("en", "es", "fr")), strict=True))
    random.Random(0).shuffle(rows)
    return rows


def tokenizer(texts: Iterable[str], size: int) -> Any:
    """Make a tokenizer of bytes and their most frequent merges."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet, (pad, end) = pre_tokenizers.ByteLevel.alphabet(), ("<pad>", "<|endoftext|>")
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[pad, end], initial_alphabet=alphabet)
    made.train_from_iterator(texts, trainer)
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=LENGTH, pad_token=pad, eos_token=end)


def kept(
    name: str, auto: Any, config: Any, processor: Any, prepare: Callable[[Any], Any], loss: Callable[..., Tensor],
    steps: int, *samples: list[Any],
) -> Deep:  # fmt: skip
    """Read a network and its processor from their folder; train the network first if it is missing."""
    folder, reader = KEPT / name, hf.AutoImageProcessor if name == "vit" else hf.AutoTokenizer
    if not folder.exists():
        with tempfile.TemporaryDirectory() as place:
            config.save_pretrained(place)
            processor().save_pretrained(place)
            processor = reader.from_pretrained(place)  # as the type of network reads it
            torch.manual_seed(0)
            model = auto.from_config(config)
            rate = 2e-3 if "LM" in type(model).__name__ else 1e-3
            train(model, partial(loss, model, prepare(processor)), model, steps, rate)
            model.save_pretrained(place)
            shutil.copytree(place, folder)
    return Deep(name, folder, auto.from_pretrained(folder).eval(), reader.from_pretrained(folder), *samples)


def decoder(name: str) -> Deep:
    """Return a decoder that writes English."""
    characters, size = (70, 258) if name == "llama" else (200, 2_000)  # 258 are all bytes and two special tokens
    texts = english(characters)
    seen, calibration, test = texts[HELD_OUT:], texts[TEST:HELD_OUT], texts[:TEST]
    config = hf.AutoConfig.for_model(
        {"qwen": "qwen2"}.get(name, name), vocab_size=size, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        hidden_size=128, num_hidden_layers=8, num_attention_heads=4, max_position_embeddings=LENGTH,
        **({} if name == "gpt2" else {"intermediate_size": 344, "num_key_value_heads": 4}),
    )  # fmt: skip

    def stream(words: Any) -> Tensor:
        return torch.tensor(words(words.eos_token.join(seen), verbose=False)["input_ids"])

    def loss(model: Any, tokens: Tensor, draw: torch.Generator) -> Tensor:
        starts = torch.randint(len(tokens) - LENGTH, (12,), generator=draw).tolist()
        ids = torch.stack([tokens[start : start + LENGTH] for start in starts])
        return model(input_ids=ids, labels=ids).loss

    other = paragraphs(column("text", "tweet*/spanish/*.parquet"), characters)
    auto, words = hf.AutoModelForCausalLM, partial(tokenizer, seen, size)
    return kept(name, auto, config, words, stream, loss, 1_000, calibration, test, other)


def encoded(model: Any, words: Any, texts: list[str]) -> Tensor:
    """Return the means of the last states of texts, of length 1."""
    inputs = words(texts, padding=True, truncation=True, return_tensors="pt")
    states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
    return functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def sentences(name: str) -> Deep:
    """Return an encoder of sentences; keep it for sentence-transformers too, if that is installed."""
    rows = translations()
    config = hf.BertConfig(
        vocab_size=4_000, hidden_size=128, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    def loss(model: Any, words: Any, draw: torch.Generator) -> Tensor:
        chosen = (HELD_OUT + torch.randperm(len(rows) - HELD_OUT, generator=draw)[:64]).tolist()
        languages = torch.randint(1, 3, (64,), generator=draw).tolist()
        translated = [rows[i][language] for i, language in zip(chosen, languages, strict=True)]
        a, b = encoded(model, words, [rows[i][0] for i in chosen] + translated).chunk(2)
        scores, right = a @ b.T / 0.05, torch.arange(64)
        return functional.cross_entropy(scores, right) + functional.cross_entropy(scores.T, right)

    first, seen = [row[0] for row in rows[:HELD_OUT]], [text for row in rows[HELD_OUT:] for text in row]
    samples = first[TEST:], first[:TEST], list(dict.fromkeys(column("text", "tweet*/spanish/*.parquet")))
    words = partial(tokenizer, seen, 4_000)
    deep = kept(name, hf.AutoModel, config, words, lambda words: words, loss, 1_200, *samples)
    folder = KEPT / f"{name}-st"
    if importlib.util.find_spec("sentence_transformers") and not folder.exists():
        from sentence_transformers import SentenceTransformer

        SentenceTransformer(str(deep.folder), device="cpu").save_pretrained(str(folder))
    return deep


def vit(name: str) -> Deep:
    """Return a classifier of images."""
    config = hf.AutoConfig.for_model(
        "vit", hidden_size=96, intermediate_size=192, num_hidden_layers=8, num_attention_heads=3, image_size=32,
        patch_size=4, num_labels=10,
    )  # fmt: skip

    def pixels(processor: Any) -> tuple[Tensor, Tensor]:
        seen = images("cifar10/train.parquet", 0, 20_000)
        found = processor([x["image"] for x in seen], return_tensors="pt")["pixel_values"]
        return found, torch.tensor([x["label"] for x in seen])

    def loss(model: Any, seen: tuple[Tensor, Tensor], draw: torch.Generator) -> Tensor:
        chosen = torch.randint(len(seen[0]), (64,), generator=draw)
        batch, flipped = seen[0][chosen], torch.rand(64, 1, 1, 1, generator=draw) < 0.5
        return functional.cross_entropy(model(torch.where(flipped, batch.flip(3), batch)).logits, seen[1][chosen])

    calibration, test = images("cifar10/train.parquet", 40_000, 3_000), images("cifar10/test.parquet", 0, TEST)
    auto, other = hf.AutoModelForImageClassification, images("cifar100/test.parquet", 0, 3_000)
    processor = partial(hf.ViTImageProcessor, size={"height": 32, "width": 32})
    return kept(name, auto, config, processor, pixels, loss, 1_000, calibration, test, other)


NETWORKS = {"llama": decoder, "gpt2": decoder, "vit": vit, "sentences": sentences, "qwen": decoder}


def network(name: str) -> Deep:
    """Return one of ``NETWORKS`` and its samples; train it first if it is not kept."""
    return NETWORKS[name](name)


@torch.no_grad()
def figure(deep: Deep) -> str:
    """Say how good a network is on its test samples."""
    model, processor, test = deep.model, deep.processor, deep.test
    if deep.name == "vit":
        logits = model(**processor([x["image"] for x in test], return_tensors="pt")).logits
        return f"accuracy {(logits.argmax(1) == torch.tensor([x['label'] for x in test])).float().mean():.3f}"
    if deep.name == "sentences":
        a, *others = (encoded(model, processor, list(part)) for part in zip(*translations()[:TEST], strict=True))
        found = [float(((a @ b.T).argmax(1) == torch.arange(TEST)).float().mean()) for b in others]
        return f"nearest of {TEST} is the Spanish translation {found[0]:.3f}, the French {found[1]:.3f}"
    losses, tokens = 0.0, 0
    for text in test:
        ids = processor(text, truncation=True, return_tensors="pt")["input_ids"]
        losses, tokens = losses + float(model(ids, labels=ids).loss) * (ids.numel() - 1), tokens + ids.numel() - 1
    return f"loss {losses / tokens:.3f} (perplexity {math.exp(losses / tokens):.2f}), {tokens / TEST:.0f} tokens a text"


def main() -> None:
    """Train the networks that are missing, and print how good they are."""
    if not (SHARED / "data").is_dir():
        print(f"skipped: no data in {SHARED}")
        return
    for name in sys.argv[1:] or NETWORKS:
        began = time.process_time()
        deep = network(name)
        seconds, sizes = time.process_time() - began, [len(x) for x in (deep.calibration, deep.test, deep.other)]
        print(f"{name}: {figure(deep)}; samples {sizes}; {seconds:.0f} CPU s; {deep.folder}", flush=True)
    print(machine())


if __name__ == "__main__":
    main()
