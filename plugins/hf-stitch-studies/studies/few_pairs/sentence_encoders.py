"""Train two small sentence encoders separately, with different texts, tokenizers, sizes and seeds.

Each learns to retrieve the second half of a passage within a batch, given the first half. Texts come from
``studies/relative_representations/debian_texts.py``:

    python run.py few_pairs.sentence_encoders --texts TEXTS --networks NETWORKS
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from language_models.decoders import cut, descend, written
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

SOURCES = ("anarchism", "foldoc", "fortunes", "handbook", "jargon", "reference", "wordnet")
LENGTH = 240  # minimum number of characters of a passage, extended to the end of the word
TOKENS, STEPS, BATCH, TEMPERATURE = 40, 1500, 128, 0.05
PAD, UNKNOWN = "<pad>", "<unk>"


@dataclass(frozen=True)
class Kind:
    """Kind of sentence encoder."""

    vocabulary: int  # number of tokens
    width: int  # width of its vectors
    depth: int  # number of blocks
    part: int  # half of the passages for its training: 0 or 1


KINDS = {"narrow": Kind(4_000, 192, 3, 0), "wide": Kind(8_000, 256, 2, 1)}


def passages(texts: Path) -> tuple[list[str], list[str]]:
    """Return training and held-out passages."""
    return cut(texts, SOURCES, LENGTH, 120, 10)


def tokenizer(kind: Kind, texts: list[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer of an encoder: BPE for the narrow encoder, Unigram for the wide encoder."""
    special: list[str] = [PAD, UNKNOWN]
    trainer: trainers.Trainer
    if kind.part == 0:
        untrained = Tokenizer(models.BPE(unk_token=UNKNOWN))
        trainer = trainers.BpeTrainer(vocab_size=kind.vocabulary, special_tokens=special, show_progress=False)
    else:
        untrained = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=kind.vocabulary, special_tokens=special, unk_token=UNKNOWN, show_progress=False
        )
    untrained.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    untrained.pre_tokenizer = pre_tokenizers.Metaspace()
    untrained.decoder = decoders.Metaspace()
    untrained.train_from_iterator(texts[::3], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=untrained, pad_token=PAD, unk_token=UNKNOWN, padding_side="right", model_max_length=2 * TOKENS
    )


def vectors(network: BertModel, reader: PreTrainedTokenizerFast, texts: Sequence[str], length: int) -> Tensor:
    read = reader(list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt")
    states = network(input_ids=read["input_ids"], attention_mask=read["attention_mask"]).last_hidden_state
    mask = read["attention_mask"][..., None].to(states)
    return (states * mask).sum(1) / mask.sum(1)


def halves(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    pairs = []
    for text in texts:
        middle = text.rfind(" ", 0, len(text) // 2 + 1)
        middle = len(text) // 2 if middle < 0 else middle
        pairs.append((text[:middle], text[middle:].strip() or text[:middle]))
    return [first for first, _ in pairs], [second for _, second in pairs]


def train(name: str, folder: Path) -> tuple[BertModel, PreTrainedTokenizerFast]:
    kind, (texts, held_out) = KINDS[name], passages(folder)
    texts = texts[kind.part :: 2]
    reader = tokenizer(kind, texts)
    generator = torch.Generator().manual_seed(kind.part)
    torch.manual_seed(kind.part)
    config = BertConfig(
        vocab_size=len(reader), hidden_size=kind.width, num_hidden_layers=kind.depth, num_attention_heads=4,
        intermediate_size=3 * kind.width, max_position_embeddings=2 * TOKENS, pad_token_id=reader.pad_token_id,
    )  # fmt: skip
    network = BertModel(config, add_pooling_layer=False)

    def losses() -> Iterator[Tensor]:
        for _ in range(STEPS):
            chosen = torch.randint(len(texts), (BATCH,), generator=generator).tolist()
            first, second = (
                functional.normalize(vectors(network, reader, half, TOKENS), dim=1)
                for half in halves([texts[i] for i in chosen])
            )
            logits, right = first @ second.T / TEMPERATURE, torch.arange(BATCH)
            yield (functional.cross_entropy(logits, right) + functional.cross_entropy(logits.T, right)) / 2

    descend(network, losses(), STEPS, lambda share: 1 - share, lr=1e-3, weight_decay=0.01)
    print(f"the second half is found among 500: {retrieval_rate(network, reader, held_out[:500]):.2f}")
    return network, reader


@torch.no_grad()
def retrieval_rate(network: BertModel, reader: PreTrainedTokenizerFast, texts: Sequence[str]) -> float:
    """Return the share of passages with the own second half as nearest neighbour of the first half."""
    first, second = (functional.normalize(vectors(network, reader, half, TOKENS), dim=1) for half in halves(texts))
    return ((first @ second.T).argmax(1) == torch.arange(len(texts))).float().mean().item()


def main() -> None:
    written(__doc__, KINDS, train)
