"""Train two small sentence encoders apart: other texts, other tokenizers, other sizes, other seeds.

Each learns to find the second half of a passage among those of a batch, given the first. Texts come from
``studies/relative_representations/debian_texts.py``:
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from language_models.decoders import cut
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

SOURCES = ("anarchism", "foldoc", "fortunes", "handbook", "jargon", "reference", "wordnet")
LENGTH = 240  # characters of a passage, at least; it ends with the word
TOKENS, BATCH, TEMPERATURE, RATE = 40, 128, 0.05, 1e-3
PAD, UNKNOWN = "<pad>", "<unk>"


@dataclass(frozen=True)
class Kind:
    """A sentence encoder."""

    vocabulary: int  # number of tokens
    width: int  # width of its vectors
    depth: int  # number of blocks
    part: int  # which half of the passages it reads: 0 or 1


KINDS = {"narrow": Kind(4_000, 192, 3, 0), "wide": Kind(8_000, 256, 2, 1)}


def passages(texts: Path) -> tuple[list[str], list[str]]:
    """Return passages for training, and passages held out."""
    return cut(texts, SOURCES, LENGTH, 120, 10)


def tokenizer(kind: Kind, texts: list[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer of an encoder: BPE for the narrow one, Unigram for the wide one."""
    special: list[str] = [PAD, UNKNOWN]
    trainer: trainers.Trainer
    if kind.part == 0:
        made = Tokenizer(models.BPE(unk_token=UNKNOWN))
        trainer = trainers.BpeTrainer(vocab_size=kind.vocabulary, special_tokens=special, show_progress=False)
    else:
        made = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=kind.vocabulary, special_tokens=special, unk_token=UNKNOWN, show_progress=False
        )
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(texts[::3], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, unk_token=UNKNOWN, padding_side="right", model_max_length=2 * TOKENS
    )


def vectors(network: BertModel, reader: PreTrainedTokenizerFast, texts: Sequence[str], length: int) -> Tensor:
    """Return the mean over the tokens of each text."""
    read = reader(list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt")
    states = network(input_ids=read["input_ids"], attention_mask=read["attention_mask"]).last_hidden_state
    mask = read["attention_mask"][..., None].to(states)
    return (states * mask).sum(1) / mask.sum(1)


def halves(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut texts at the word nearest to their middle."""
    found = []
    for text in texts:
        middle = text.rfind(" ", 0, len(text) // 2 + 1)
        middle = len(text) // 2 if middle < 0 else middle
        found.append((text[:middle], text[middle:].strip() or text[:middle]))
    return [first for first, _ in found], [second for _, second in found]


def train(kind: Kind, texts: list[str], steps: int) -> tuple[BertModel, PreTrainedTokenizerFast]:
    """Train an encoder."""
    texts = texts[kind.part :: 2]
    reader = tokenizer(kind, texts)
    generator = torch.Generator().manual_seed(kind.part)
    torch.manual_seed(kind.part)
    network = BertModel(
        BertConfig(
            vocab_size=len(reader), hidden_size=kind.width, num_hidden_layers=kind.depth, num_attention_heads=4,
            intermediate_size=3 * kind.width, max_position_embeddings=2 * TOKENS, pad_token_id=reader.pad_token_id,
        ),
        add_pooling_layer=False,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 100) * (1 - step / steps)
    )
    for step in track(range(steps), f"training, width {kind.width}"):
        chosen = torch.randint(len(texts), (BATCH,), generator=generator).tolist()
        first, second = (
            functional.normalize(vectors(network, reader, half, TOKENS), dim=1)
            for half in halves([texts[i] for i in chosen])
        )
        logits, right = first @ second.T / TEMPERATURE, torch.arange(BATCH)
        loss = (functional.cross_entropy(logits, right) + functional.cross_entropy(logits.T, right)) / 2
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    return network.eval(), reader


@torch.no_grad()
def found(network: BertModel, reader: PreTrainedTokenizerFast, texts: Sequence[str]) -> float:
    """Return how often the second half of a passage is the nearest to the first among those of all passages."""
    first, second = (functional.normalize(vectors(network, reader, half, TOKENS), dim=1) for half in halves(texts))
    return ((first @ second.T).argmax(1) == torch.arange(len(texts))).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--networks", type=Path, required=True, help="folder for the encoders")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=KINDS, help="train this encoder alone")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    texts, held_out = passages(arguments.texts)
    for name, kind in KINDS.items():
        if arguments.only in (None, name):
            start = time.perf_counter()
            network, reader = train(kind, texts, arguments.steps)
            network.save_pretrained(arguments.networks / name)
            reader.save_pretrained(arguments.networks / name)
            print(
                f"{name}: {network.num_parameters():,} parameters, {time.perf_counter() - start:.0f} s; the second "
                f"half is found among 500: {found(network, reader, held_out[:500]):.2f}"
            )
