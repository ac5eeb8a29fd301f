"""Masked language models: the same masks everywhere, figures computed by hand, and every way through the package."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from processes import run_ranks
from tiny_networks import TEXT, WORDS, adapted, tokenizer
from torch.nn import functional

import hf_stitch
import hf_stitch.auto
from hf_stitch.scoring.passing import Scoring
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks.base import IGNORED
from hf_stitch.tasks.heads import task_named

LAYER = "bert.encoder.layer.1"
CUT = {"source_layer": LAYER, "target_layer": LAYER, "progress": False}
MASK = 4
TEXTS = [" ".join(WORDS[(i * 7 + j * (1 + i % 4)) % 50] for j in range(1 + i % 30)) for i in range(90)]
TASK = task_named("fill-mask")


def with_masks() -> Any:
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return tokenizer(60, 0, *names.values(), "[MASK]", **names, mask_token="[MASK]")


def untrained(seed: int) -> transformers.BertForMaskedLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)).eval()


@cache
def trained(seed: int) -> transformers.BertForMaskedLM:
    """A network that fills masks somewhat better than chance."""
    net = hf_stitch.load(model := untrained(seed), processor=with_masks())
    inputs, labels = dict(TASK.inputs(net, TEXTS)), TASK.asked(net, TEXTS, None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
    return model.requires_grad_(False)


def network(seed: int = 0) -> hf_stitch.Adapter:
    return hf_stitch.load(trained(seed), processor=with_masks())


@torch.no_grad()
def by_hand(net: hf_stitch.Adapter, text: str) -> list[tuple[int, torch.Tensor]]:
    """True tokens and logits at the masks of one text alone."""
    inputs = dict(TASK.inputs(net, [text]))
    true, places = net.preprocess([text])["input_ids"][0], (inputs["input_ids"][0] == MASK).nonzero()[:, 0].tolist()
    logits = net.model(**inputs).logits[0]
    return [(int(true[place]), logits[place]) for place in places]


# -- masks -------------------------------------------------------------------------------------------------------------
def test_each_text_has_its_masks_whatever_stands_beside_it() -> None:
    net = network()
    together = TASK.inputs(net, TEXTS)["input_ids"]
    for text, row, true in zip(TEXTS, together, TASK.asked(net, TEXTS, None), strict=True):
        length = len(text.split())
        alone = TASK.inputs(net, [text])["input_ids"][0]
        assert torch.equal(row[: len(alone)], alone) and not row[len(alone) :].any()
        assert int((alone == MASK).sum()) == max(round(0.15 * length), 1)
        read = net.preprocess([text])["input_ids"][0]
        assert torch.equal(true[: len(alone)], torch.where(alone == MASK, read, IGNORED))
    assert len({int((row == MASK).nonzero()[0]) for row in together}) > 10  # not always the same place


def test_special_tokens_and_padding_are_never_masked() -> None:
    net = network()
    net.processor._tokenizer.post_processor = _ends()
    ids = net.preprocess(TEXTS)["input_ids"]
    assert not ((TASK.inputs(net, TEXTS)["input_ids"] == MASK) & (ids < 5)).any() and (ids[:, 0] == 2).all()


def _ends() -> Any:
    from tokenizers import processors

    return processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])


# -- every verb --------------------------------------------------------------------------------------------------------
def test_a_network_stitched_to_itself_is_the_network_in_every_verb() -> None:
    net = network()
    model = hf_stitch.stitch(net, net, TEXTS, matcher="identity", **CUT)
    assert (type(model).__name__, model.task) == ("StitchedModelForMaskedLM", "fill-mask")
    assert model.describe().recipe["masking"] == {"share": 0.15, "seed": 0}
    found = hf_stitch.evaluate(model, TEXTS, batch_size=7, resamples=50, examples=2, progress=False)
    pairs = [pair for text in TEXTS for pair in by_hand(net, text)]
    loss = np.mean([functional.cross_entropy(logits, torch.tensor(true)).item() for true, logits in pairs])
    predicted = [int(logits.argmax()) for _, logits in pairs]
    for who in ("stitched", "identity", "source", "target"):
        row = {name: score.value for name, score in found.scores[who].items()}
        assert row["cross_entropy"] == pytest.approx(loss, rel=1e-5)
        assert row["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
        assert row["accuracy"] == pytest.approx(np.mean(np.array(predicted) == [true for true, _ in pairs]))
        assert (row["agreement"], row["relative_perplexity"], row["kl_divergence"]) == (1, 1, 0)
    true = [token for token, _ in pairs]
    shares = np.bincount(true)[np.bincount(true) > 0] / len(true)
    most = int(np.bincount(true).argmax())
    chance = {name: score.value for name, score in found.scores["chance"].items()}
    assert chance["cross_entropy"] == pytest.approx(-np.sum(shares * np.log(shares)))
    assert chance["accuracy"] == pytest.approx(true.count(most) / len(true))
    assert chance["agreement"] == pytest.approx(predicted.count(most) / len(predicted))
    again = hf_stitch.evaluate(model, TEXTS, batch_size=64, resamples=50, progress=False)
    for name, score in found.scores["stitched"].items():
        assert again[name].value == pytest.approx(score.value, rel=1e-5)

    fresh = [f" {text}" for text in TEXTS]
    grid = hf_stitch.stitch_grid(
        net, net, TEXTS, test_data=fresh, layers_a=[LAYER], layers_b=[LAYER], matchers=["identity"], resamples=9,
        progress=False,
    )  # fmt: skip
    other = hf_stitch.evaluate(model, fresh, resamples=9, progress=False)
    assert grid.figures[0] == "relative_perplexity" and grid.values().item() == 1
    assert grid.values("identity", "perplexity").item() == pytest.approx(other["perplexity"].value, rel=1e-6)


def between(**options: Any) -> Any:
    """A grid between networks, whose batches have texts of other lengths, and so other numbers of masks."""
    a, b = (hf_stitch.load(untrained(seed), processor=with_masks()) for seed in range(2))
    texts = sorted((f" {text}" for text in TEXTS), key=lambda text: len(text.split()))
    return hf_stitch.stitch_grid(
        a, b, TEXTS, test_data=texts, layers_a=[LAYER], layers_b=[LAYER], resamples=9, progress=False, **options
    )


def test_an_interrupted_grid_resumes_and_batches_of_other_sizes_have_the_same_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = between(batch_size=20)
    assert between(batch_size=64).values() == pytest.approx(whole.values(), rel=1e-4)
    original, left = Scoring._measure, [3]

    def interrupted(self: Scoring, batch: Any, twin: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return original(self, batch, twin)

    monkeypatch.setattr(Checkpoint, "due", lambda self, done: True)
    monkeypatch.setattr(Scoring, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        between(batch_size=20, checkpoint_dir=tmp_path)
    left[0] = 2  # of five batches, three are in the checkpoint
    assert between(batch_size=20, checkpoint_dir=tmp_path).to_dict() == whole.to_dict()
    assert left == [0]


def score(rank: int, folder: Path) -> None:
    np.save(folder / f"{rank}.npy", between(batch_size=20).to_pandas().select_dtypes(float))


def test_two_processes_have_the_masks_and_figures_of_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run_ranks(2, score, tmp_path)
    score(2, tmp_path)
    *each, whole = (np.load(tmp_path / f"{rank}.npy") for rank in range(3))
    assert np.isfinite(whole).any() and np.array_equal(*each, equal_nan=True)
    np.testing.assert_allclose(each[0], whole, rtol=1e-6)


def test_a_map_is_fitted_to_masked_texts() -> None:
    a, b = network(), network(1)
    fitted = hf_stitch.stitch(a, b, TEXTS, test_data=TEXTS[:5], matcher="lstsq", **CUT).stitch.body
    x, y = (
        torch.cat([net.encode(TASK.inputs(net, [text]), LAYER)[LAYER].values[0] for text in TEXTS]).double()
        for net in (a, b)
    )
    by_hand = (x - x.mean(0)) @ torch.linalg.pinv(x - x.mean(0), rtol=1e-6) @ (y - y.mean(0)) + y.mean(0)
    assert torch.allclose(fitted(x.float()).double(), by_hand, atol=1e-3)


# -- bad input ---------------------------------------------------------------------------------------------------------
def test_a_tokenizer_without_a_mask_and_texts_without_tokens_are_named() -> None:
    net = network()
    with pytest.raises(ValueError, match=("a tokenizer with a mask token, got TokenizersBackend; pass")):
        TASK.inputs(adapted("bert", net.model), TEXTS)
    net.processor._tokenizer.post_processor = _ends()
    with pytest.raises(ValueError, match=r"texts must contain tokens other than special tokens \(first sample: 0"):
        hf_stitch.stitch(net, net, TEXTS, test_data=["", ""], matcher="identity", **CUT)
