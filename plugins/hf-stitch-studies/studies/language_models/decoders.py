"""Train two small decoders with different tokenizers on the same English texts.

``fine`` has a byte-level BPE tokenizer of 2,500 tokens, ``coarse`` a Unigram tokenizer of 6,000 words and word pieces.
Widths and depths also differ. Texts come from ``studies/relative_representations/debian_texts.py``:

    python run.py language_models.decoders --texts TEXTS --networks NETWORKS
"""

import argparse
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import study
import torch
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import hf_stitch
from hf_stitch import Adapter

START, PAD = "<s>", "<pad>"
SOURCES = ("anarchism", "foldoc", "fortunes", "handbook", "jargon", "reference")
LENGTH = 300  # minimum number of characters of a text, extended to the end of the word

TOKENS = 128  # tokens of a sequence in training


@dataclass(frozen=True)
class Kind:
    """Kind of decoder."""

    vocabulary: int  # number of tokens
    width: int  # width of the residual stream
    depth: int  # number of blocks
    seed: int  # seed of its weights and data order


KINDS = {"fine": Kind(2_500, 192, 5, 0), "coarse": Kind(6_000, 160, 6, 1)}


def cut(texts: Path, sources: Sequence[str], length: int, least: int, every: int) -> tuple[list[str], list[str]]:
    """Cut texts into passages; return the training passages, and each ``every``-th passage as held-out."""
    parts = []
    for name in sources:
        for line in (texts / f"{name}.txt").read_text(encoding="utf-8").splitlines():
            parts += [part.strip() for part in re.findall(rf".{{{length},}}?(?=\s|$)|.+$", line) if len(part) > least]
    return [text for i, text in enumerate(parts) if i % every], parts[::every]


def passages(texts: Path) -> tuple[list[str], list[str]]:
    """Return training and held-out passages."""
    return cut(texts, SOURCES, LENGTH, 80, 20)


def tokenizer(name: str, texts: list[str]) -> PreTrainedTokenizerFast:
    size, special = KINDS[name].vocabulary, [START, PAD]
    trainer: trainers.Trainer
    if name == "fine":
        untrained = Tokenizer(models.BPE())
        untrained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        untrained.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        untrained = Tokenizer(models.Unigram())
        untrained.pre_tokenizer = pre_tokenizers.Metaspace()
        untrained.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=size, special_tokens=[*special, "<unk>"], unk_token="<unk>", show_progress=False
        )
    untrained.train_from_iterator(texts[::3], trainer)
    untrained.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, untrained.token_to_id(START))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=untrained, bos_token=START, pad_token=PAD, padding_side="right")


def batches(sequences: torch.Tensor, size: int, seed: int) -> Iterator[torch.Tensor]:
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed))
    for start in range(0, len(order) - size + 1, size):
        yield sequences[order[start : start + size]]


def load(folder: Path, name: str) -> Adapter:
    network = AutoModelForCausalLM.from_pretrained(folder / name).eval()
    return hf_stitch.load(network, processor=AutoTokenizer.from_pretrained(folder / name))


def descend(
    network: PreTrainedModel, losses: Iterable[Tensor], steps: int, share: Callable[[float], float], **options: Any
) -> None:
    """Minimise an iterable of losses; after a warm-up, the learning rate is ``share`` of its maximum."""
    optimizer = torch.optim.AdamW(network.parameters(), **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 100) * share(i / steps))
    for step, loss in enumerate(track(losses, "training", steps)):
        study.descend(optimizer, loss, network.parameters())
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    network.eval()


def written(description: str | None, names: Iterable[str], make: Callable[[str, Path], tuple[Any, Any]]) -> None:
    """Read the command line, train networks, and save each with its tokenizer in a folder of its name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--networks", type=Path, required=True, help="folder for the networks")
    arguments = parser.parse_args()
    for name in names:
        start = time.perf_counter()
        network, reader = make(name, arguments.texts)
        network.save_pretrained(arguments.networks / name)
        reader.save_pretrained(arguments.networks / name)
        print(f"{name}: {network.num_parameters():,} parameters, {time.perf_counter() - start:.0f} s")


def train(name: str, folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    texts, _ = passages(folder)
    kind, reader = KINDS[name], tokenizer(name, texts)
    ids = np.concatenate([np.array(token_ids, dtype=np.int64) for token_ids in reader(texts)["input_ids"]])
    ids = ids[: len(ids) // TOKENS * TOKENS]
    sequences = torch.from_numpy(ids).view(-1, TOKENS)
    torch.manual_seed(kind.seed)
    config = LlamaConfig(
        vocab_size=len(reader), hidden_size=kind.width, num_hidden_layers=kind.depth, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=kind.width * 8 // 3, max_position_embeddings=512,
        bos_token_id=reader.bos_token_id, eos_token_id=None, pad_token_id=reader.pad_token_id,
    )  # fmt: skip
    network, size = LlamaForCausalLM(config), 32
    losses = (network(input_ids=batch, labels=batch).loss for batch in batches(sequences, size, kind.seed))
    descend(
        network, losses, len(sequences) // size, lambda share: 0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2,
        lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95),
    )  # fmt: skip
    return network, reader


def main() -> None:
    written(__doc__, KINDS, train)
