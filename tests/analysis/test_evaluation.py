"""Scores of stitched models compared with reference computations."""

from __future__ import annotations

import copy
import random
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.special import entr, log_softmax, rel_entr, softmax

import hf_stitch
from hf_stitch import Adapter, Samples, StitchedModel, evaluate
from hf_stitch.analysis import Score
from hf_stitch.scoring.halves import whole_target

from tiny_networks import WORDS, tokenizer  # isort: skip

N, CLASSES, LAYER = 60, 4, "vit.layers.0"
CUT = {"source_layer": LAYER, "target_layer": LAYER, "progress": False}


def network(kind: Any, seed: int, **options: Any) -> Any:
    """A tiny network whose predictions vary between samples."""
    config = kind.config_class(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, initializer_range=0.3,
        **options,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(config).eval()


@pytest.fixture(scope="module")
def case() -> Any:
    """A source ``a``, a target ``b``, images of which half have the predictions of the target as labels, and a model.

    It is scored on the first 60 images, in the call to stitch.
    """
    options, kind = {"image_size": 16, "patch_size": 8, "num_labels": CLASSES}, transformers.ViTForImageClassification
    a, b = (hf_stitch.load(network(kind, seed, **options)) for seed in (0, 1))
    pixels = torch.randn(200, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = b.model(pixels).logits
    labels = [int(found) if i % 2 else i % CLASSES for i, found in enumerate(logits.argmax(-1))]
    data = [{"image": image, "label": label} for image, label in zip(pixels, labels, strict=True)]
    stitched = hf_stitch.stitch(a, b, data[N:], test_data=data[:N], **CUT)
    first = {"pixels": pixels[:N], "labels": np.array(labels[:N]), "logits": logits[:N]}
    return SimpleNamespace(a=a, b=b, data=data, stitched=stitched, scored=stitched.evaluation, **first)


def by_hand(logits: torch.Tensor, target: torch.Tensor, labels: np.ndarray) -> dict[str, float]:
    own, reference = logits.double().numpy(), target.double().numpy()
    accuracy, of_target = (own.argmax(1) == labels).mean(), (reference.argmax(1) == labels).mean()
    return {
        "accuracy": accuracy,
        "relative_accuracy": accuracy / of_target,
        "cross_entropy": -log_softmax(own, axis=1)[np.arange(len(labels)), labels].mean(),
        "agreement": (own.argmax(1) == reference.argmax(1)).mean(),
        "kl_divergence": rel_entr(softmax(reference, axis=1), softmax(own, axis=1)).sum(1).mean(),
    }


def values_of(figures: Any) -> dict[str, float]:
    return {figure: score.value for figure, score in figures.items()}


@torch.no_grad()
def test_figures_of_classifiers_match_numpy(case: Any) -> None:
    pixels, labels, target = case.pixels, case.labels, case.logits
    x = case.a.encode(pixels, LAYER)[LAYER]
    y = case.b.encode(torch.stack([s["image"] for s in case.data[N:]]), LAYER)[LAYER]
    torch.testing.assert_close(case.stitched.stitch.body_mean, y.rows("none").mean(0))
    torch.testing.assert_close(case.stitched.stitch.prefix_mean, y.prefix()[:, 0].mean(0))
    means = torch.cat([case.stitched.stitch.prefix_mean[None], case.stitched.stitch.body_mean.expand(4, -1)])
    predictors = {
        "stitched": case.stitched(pixel_values=pixels).logits,
        "identity": case.b.decode(x, LAYER).logits,
        "mean_only": case.b.decode(x.replace(values=means.expand(N, -1, -1)), LAYER).logits,
        "source": case.a.model(pixels).logits,
        "target": target,
    }
    assert list(case.scored.scores) == [*predictors, "chance"]
    for name, logits in predictors.items():
        assert values_of(case.scored.scores[name]) == pytest.approx(by_hand(logits, target, labels), abs=1e-6)
    shares = np.bincount(labels, minlength=CLASSES) / N
    chance = values_of(case.scored.scores["chance"])
    assert chance["accuracy"] == pytest.approx(shares.max())
    assert chance["cross_entropy"] == pytest.approx(entr(shares).sum())
    assert chance["agreement"] == pytest.approx(np.bincount(target.argmax(-1).numpy()).max() / N)
    assert 0 < case.scored["agreement"].value < 1


def test_intervals_are_those_of_a_bootstrap_shrink_with_n_and_depend_on_the_seed(case: Any) -> None:
    with torch.no_grad():
        agrees = (case.stitched(pixel_values=case.pixels).logits.argmax(-1) == case.logits.argmax(-1)).numpy()
    drawn = [agrees[np.random.default_rng(i).integers(0, N, N)].mean() for i in range(4000)]
    score = case.scored["agreement"]
    assert [score.low, score.high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=1.6 / N)
    for figures in case.scored.scores.values():
        for score in figures.values():
            assert score.low <= score.value <= score.high
    again, other, few = (
        evaluate(case.stitched, part, target=case.b, seed=seed, progress=False)
        for part, seed in ((case.data[:N], 0), (case.data[:N], 1), (case.data[:15], 0))
    )
    assert again == case.scored != other
    assert all(values_of(row) == values_of(case.scored.scores[who]) for who, row in other.scores.items())
    assert few["agreement"].high - few["agreement"].low > case.scored["agreement"].high - case.scored["agreement"].low


def test_a_single_sample_has_no_intervals(case: Any) -> None:
    one = evaluate(case.stitched, case.data[:1], target=case.b, progress=False)
    scores = [score for figures in one.scores.values() for score in figures.values()]
    assert np.isnan([(score.low, score.high) for score in scores]).all()
    assert str(one.scores["target"]["agreement"]) == "1.000 [–]"
    assert one.no_better == ("identity", "mean_only", "chance")


def test_a_model_is_scored_in_eval_mode_and_its_modes_are_restored(case: Any) -> None:
    model = hf_stitch.stitch(case.b, case.b, case.data, matcher="identity", **CUT).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.9
    model.source.training = False
    modes = [module.training for module in model.modules()]
    assert evaluate(model, case.data[:N], target=case.b, progress=False)["agreement"].value == 1.0
    assert [module.training for module in model.modules()] == modes


def test_a_target_that_is_not_the_recorded_one_is_warned_of(monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    with pytest.warns(UserWarning, match=r"differs from the target .* in weights \(hash .*, now ") as seen:
        assert whole_target(case.stitched, case.a) is case.a
    assert len(seen) == 1
    relu = copy.deepcopy(case.b.model)
    relu.config.hidden_act = "relu"
    with pytest.warns(UserWarning, match=r"in config \(hidden_act 'gelu', now 'relu'; "):
        evaluate(case.stitched, case.data[:N], target=relu, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole_target(case.stitched, case.b.model)
        reference = {**case.stitched.config.target["reference"], "weights_hash": None}
        monkeypatch.setitem(case.stitched.config.target, "reference", reference)
        whole_target(case.stitched, case.a)


def test_agreement_and_divergence_are_the_only_figures_without_labels(case: Any) -> None:
    unlabelled = evaluate(case.stitched, case.pixels, target=case.b, progress=False)
    figures = {who: tuple(found) for who, found in unlabelled.scores.items()}
    assert figures.pop("chance") == ("agreement",)
    assert {*figures.values()} == {("agreement", "kl_divergence")}
    assert all(unlabelled[figure] == case.scored[figure] for figure in ("agreement", "kl_divergence"))


def test_relative_accuracy_is_nan_if_the_target_is_never_correct(case: Any) -> None:
    predicted = case.logits.argmax(-1).tolist()
    wrong = [{**s, "label": (label + 1) % CLASSES} for s, label in zip(case.data, predicted, strict=False)]
    found = evaluate(case.stitched, wrong, target=case.b, progress=False)
    assert np.isnan([found["relative_accuracy"].value, found["relative_accuracy"].low]).all()


@pytest.mark.parametrize(("side", "what"), [("source", "layer 'vit.layers.0' of the source is"), ("target", "logits")])
def test_a_sample_that_overflows_in_a_network_is_named(side: str, what: str, case: Any) -> None:
    ids = [f"n{i}" for i in range(N)]
    rows = [dict(sample) for sample in case.data[:N]]
    rows[7]["image"] = torch.full((3, 16, 16), 3e38)
    broken, whole = Samples.of(rows, id=ids), Samples.of(case.data[:N], id=ids)
    sides = (broken, whole) if side == "source" else (whole, broken)
    with pytest.raises(ValueError, match=f"(?s){what}.* NaN or infinite for .*'n7'"):
        evaluate(case.stitched, sides[0], target=case.b, paired_data=sides[1], progress=False)


def test_an_evaluation_converts_to_pandas_text_and_figure(case: Any) -> None:
    frame = case.scored.to_pandas()
    assert list(frame.columns) == ["predictor", "figure", "value", "low", "high"]
    assert len(frame) == 6 * 5 - 1  # chance has no divergence
    row = frame[(frame.predictor == "identity") & (frame.figure == "agreement")].iloc[0]
    assert row.value == case.scored.scores["identity"]["agreement"].value
    assert "60 held-out samples" in str(case.scored)
    for word in (*case.scored.scores, "relative accuracy", *str(case.scored["accuracy"]).split(" [")):
        assert word in str(case.scored)
    (axes,) = case.scored.plot("agreement").axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [who.replace("_", " ") for who in case.scored.scores]
    for figure in case.scored.scores["stitched"]:  # of those that have it
        shown = [text.get_text() for text in case.scored.plot(figure).axes[0].get_yticklabels()]
        assert shown == [who.replace("_", " ") for who, row in case.scored.scores.items() if figure in row]
    assert "chance" not in [text.get_text() for text in case.scored.plot("kl_divergence").axes[0].get_yticklabels()]
    with pytest.raises(KeyError, match=r"figure must be one of accuracy, .*, kl_divergence, got 'f1'"):
        case.scored.plot("f1")


# -- target --------------------------------------------------------------------------------------------------------


def test_a_loaded_model_needs_the_target_if_it_has_no_name(tmp_path: Any, case: Any) -> None:
    case.stitched.save_pretrained(tmp_path)
    again = StitchedModel.from_pretrained(tmp_path)
    assert evaluate(again, case.data[:N], target=case.b.model, source=case.a.model, progress=False) == case.scored
    without = evaluate(again, case.data[:N], target=case.b.model, progress=False)
    assert without.left_out == {"source": "it is not in memory; pass the whole source"}
    assert {**without.scores, "source": case.scored.scores["source"]} == case.scored.scores
    with pytest.raises(ValueError, match="pass it as target=…"):
        evaluate(again, case.data[:N], progress=False)


# -- language ------------------------------------------------------------------------------------------------------


def llama(seed: int, padding: str) -> Adapter:
    """A language model with relative positions."""
    ends = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    words = tokenizer(30, 0, "[PAD]", "[UNK]", pad_token="[PAD]", unk_token="[UNK]", padding_side=padding)
    return hf_stitch.load(network(transformers.LlamaForCausalLM, seed, **ends), processor=words)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Texts of 1 to 8 words; a text of one word has no next token."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS[:30], k=1 + i % 8)) for i in range(120)]


@pytest.mark.parametrize("padding", ["right", "left"])
def test_figures_of_language_models_match_a_loop(padding: str, texts: list[str]) -> None:
    a, b = llama(0, padding), llama(1, padding)
    cut = {"source_layer": "model.layers.0", "target_layer": "model.layers.0", "progress": False}
    with pytest.raises(ValueError, match=r"texts must contain a second token to predict \(first sample: 0"):
        hf_stitch.stitch(a, b, texts[:40], test_data=["w1"] * 9, **cut)
    model = hf_stitch.stitch(a, b, texts[40:], test_data=texts[:40], batch_size=11, **cut)
    losses: dict[str, list[float]] = {"stitched": [], "target": []}
    agrees, apart = [], []
    for text in texts[:40]:  # without batching there is no padding
        batch = b.preprocess([text])
        with torch.no_grad():
            logits = {"stitched": model(**batch).logits[0].double(), "target": b.model(**batch).logits[0].double()}
        for i, token in enumerate(batch["input_ids"][0, 1:]):
            for name, losses_of in losses.items():
                losses_of.append(-logits[name][i].log_softmax(-1)[token].item())
            agrees.append((logits["stitched"][i].argmax() == logits["target"][i].argmax()).item())
            apart.append(rel_entr(*(logits[name][i].softmax(-1).numpy() for name in ("target", "stitched"))).sum())
    found = model.evaluation
    mean, target = np.mean(losses["stitched"]), np.mean(losses["target"])
    assert found["cross_entropy"].value == pytest.approx(mean, rel=1e-5)
    assert found["perplexity"].value == pytest.approx(np.exp(mean), rel=1e-5)
    assert found["relative_perplexity"].value == pytest.approx(np.exp(mean - target), rel=1e-5)
    assert found["agreement"].value == pytest.approx(np.mean(agrees))
    assert found["kl_divergence"].value == pytest.approx(np.mean(apart), rel=1e-4)
    assert found.scores["target"]["kl_divergence"].value == 0 and "kl_divergence" not in found.scores["chance"]
    assert found.scores["target"]["agreement"] == Score(1.0, 1.0, 1.0)
    assert found.scores["chance"]["perplexity"].value == pytest.approx(40)
    assert found.scores["chance"]["agreement"].value == pytest.approx(1 / 40)


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (9, "sample 3 has label 9, but the target predicts classes 0 to 3"),
        (-1, "sample 3 has the label -1"),
        (None, "the sides first differ at index 0"),
    ],
)
def test_samples_that_cannot_be_scored_are_rejected(label: int | None, message: str, case: Any) -> None:
    wrong = [{**sample, "label": label if i == 3 and label else 0} for i, sample in enumerate(case.data[:N])]
    other = None if label else Samples.of(case.data).select(range(1, N + 1))
    with pytest.raises(ValueError, match=message):
        evaluate(case.stitched, Samples.of(wrong), target=case.b, paired_data=other, progress=False)
