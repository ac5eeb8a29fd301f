"""Text encoders: from the Hub, trained here, or installed as a package."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import study
import torch
from relative_representations.encoders import Encoder, digest
from relative_representations.training import train
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import hf_stitch
from hf_stitch import Adapter

SHAPE = {
    "hidden_size": 128, "embedding_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 256, "max_position_embeddings": 130,
}  # fmt: skip
TOKENS = 32
"""Maximum number of tokens of a text in training."""
MASKED = 0.15
SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}


@dataclass(frozen=True)
class Recipe:
    """Architecture and training of a local encoder."""

    family: str  # bert or roberta (masked language modelling), or electra (replaced token detection)
    epochs: int  # on the corpus
    seed: int = 0  # of weights and order
    vocabulary: int = 4000  # learnt from the corpus: bytes (RoBERTa), lower-case words (BERT) or words (ELECTRA)
    cased: bool = False  # whether the words of BERT keep their case


FAMILIES = {
    "bert uncased": Recipe("bert", 0),
    "bert cased": Recipe("bert", 0, seed=1, cased=True),  # with equal seeds, both would start from the same weights
    "electra": Recipe("electra", 0),
    "roberta": Recipe("roberta", 0),
}
"""Name -> architecture of the local encoders, before training."""


def installed() -> Encoder:
    """Load the sentence encoder all-MiniLM-L6-v2 from its package."""
    folder = study.minilm()
    model = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    # Load as a module: a folder is recorded by its path, a module by its weights.
    return _encoder("MiniLM-L6", hf_stitch.load(model, processor=AutoTokenizer.from_pretrained(folder)))


def local(recipe: Recipe, corpus: Sequence[str], cache: Path) -> Encoder:
    """Load an encoder from the cache, or pretrain it on a corpus.

    Its vector is the mean over tokens, because pretraining does not train the first token.
    """
    folder = cache / "encoders" / f"{recipe.family}-{digest(asdict(recipe), SHAPE, TOKENS, list(corpus))}"
    if not (folder / "config.json").is_file():
        tokenizer = trained_tokenizer(recipe, corpus)
        _pretrained(recipe, tokenizer, corpus).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    # Without the pooler: its untrained weights would differ at every load.
    options = {} if recipe.family == "electra" else {"add_pooling_layer": False}
    model = AutoModel.from_pretrained(folder, **options).eval()
    return _encoder(recipe.family, hf_stitch.load(model, processor=AutoTokenizer.from_pretrained(folder)))


def _encoder(name: str, adapter: Adapter) -> Encoder:
    return Encoder(name, adapter, adapter.layers[-1], "mean")


def trained_tokenizer(recipe: Recipe, corpus: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer of a local encoder on a corpus."""
    if recipe.family == "roberta":
        tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL["unk_token"]))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        kind, options = trainers.BpeTrainer, {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk_token"]))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=recipe.family == "bert" and not recipe.cased)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        kind, options = trainers.WordPieceTrainer, {}
    special = list(SPECIAL.values())
    tokenizer.train_from_iterator(
        corpus, kind(vocab_size=recipe.vocabulary, special_tokens=special, show_progress=False, **options)
    )
    ends = [(token, tokenizer.token_to_id(token)) for token in (SPECIAL["cls_token"], SPECIAL["sep_token"])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{ends[0][0]} $A {ends[1][0]}", special_tokens=ends
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **SPECIAL)


def _tokens(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """Tokenise texts to padded ids ``(texts, at most TOKENS)``."""
    return tokenizer(list(texts), padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")["input_ids"]


def _trimmed(ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    return ids[:, : int((ids != tokenizer.pad_token_id).sum(1).max())]


def _pretrained(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, corpus: Sequence[str]) -> PreTrainedModel:
    torch.manual_seed(recipe.seed)
    special = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    config = AutoConfig.for_model(recipe.family, vocab_size=len(tokenizer), **SHAPE, **special)
    kind = AutoModelForPreTraining if recipe.family == "electra" else AutoModelForMaskedLM
    model, ids = kind.from_config(config), _tokens(tokenizer, corpus)
    loss = _replaced if recipe.family == "electra" else _masked
    train(
        model, len(ids), lambda places: loss(model, _trimmed(ids[places], tokenizer), tokenizer), epochs=recipe.epochs,
        batch=64, learning_rate=1e-3, weight_decay=0.01, schedule=True, clip=True, seed=recipe.seed,
        name=f"training {recipe.family}",
    )  # fmt: skip
    return model.base_model


def _masked(model: PreTrainedModel, ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    hidden = (torch.rand(ids.shape) < MASKED) & (ids >= len(SPECIAL))
    hidden[0, 1] = True  # at least one token is masked
    seen = ids.masked_fill(hidden, tokenizer.mask_token_id)
    states = model.base_model(seen, attention_mask=(ids != tokenizer.pad_token_id).long()).last_hidden_state[hidden]
    head = model.lm_head if hasattr(model, "lm_head") else model.cls
    return functional.cross_entropy(head(states), ids[hidden])


def _replaced(model: PreTrainedModel, ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the cross-entropy of detecting tokens replaced by random tokens of the batch, without a generator."""
    words = ids >= len(SPECIAL)
    others = ids[words][torch.randint(int(words.sum()), ids.shape)]
    seen = torch.where((torch.rand(ids.shape) < MASKED) & words, others, ids)
    logits = model(seen, attention_mask=(ids != tokenizer.pad_token_id).long()).logits
    return functional.binary_cross_entropy_with_logits(logits[words], (seen != ids)[words].float())
