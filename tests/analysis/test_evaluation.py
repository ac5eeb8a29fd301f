"""Scores of stitched models compared with reference computations."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.special import entr, log_softmax, rel_entr, softmax

import hf_stitch
from hf_stitch import Adapter, Samples, StitchedModel, evaluate
from hf_stitch.analysis import Evaluation, Score
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


def vit(seed: int) -> Adapter:
    options = {"image_size": 16, "patch_size": 8, "num_labels": CLASSES}
    return hf_stitch.load(network(transformers.ViTForImageClassification, seed, **options))


@pytest.fixture(scope="module")
def a() -> Adapter:
    """The source."""
    return vit(0)


@pytest.fixture(scope="module")
def b() -> Adapter:
    """The target."""
    return vit(1)


@pytest.fixture(scope="module")
def data(b: Adapter) -> list[dict[str, Any]]:
    """Images; the labels of half of them are the predictions of the target."""
    pixels = torch.randn(200, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        predicted = b.model(pixels).logits.argmax(-1).tolist()
    return [{"image": image, "label": predicted[i] if i % 2 else i % CLASSES} for i, image in enumerate(pixels)]


@pytest.fixture(scope="module")
def stitched(a: Adapter, b: Adapter, data: Any) -> StitchedModel:
    """A model from the source to the target, scored on the first 60 images."""
    return hf_stitch.stitch(a, b, data[N:], test_data=data[:N], **CUT)


@pytest.fixture(scope="module")
def scored(stitched: StitchedModel) -> Evaluation:
    """The evaluation from the call to stitch."""
    assert isinstance(stitched.evaluation, Evaluation)
    return stitched.evaluation


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
def test_figures_of_classifiers_match_numpy(
    stitched: StitchedModel, scored: Evaluation, a: Adapter, b: Adapter, data: Any
) -> None:
    pixels, labels = torch.stack([s["image"] for s in data[:N]]), np.array([s["label"] for s in data[:N]])
    x, target = a.encode(pixels, LAYER)[LAYER], b.model(pixels).logits
    means = torch.cat([stitched.stitch.prefix_mean[None], stitched.stitch.body_mean.expand(4, -1)])
    mean = x.replace(values=means.expand(N, -1, -1))
    predictors = {
        "stitched": stitched(pixel_values=pixels).logits,
        "identity": b.decode(x, LAYER).logits,
        "mean_only": b.decode(mean, LAYER).logits,
        "source": a.model(pixels).logits,
        "target": target,
    }
    assert list(scored.scores) == [*predictors, "chance"]
    for name, logits in predictors.items():
        expected = by_hand(logits, target, labels)
        assert values_of(scored.scores[name]) == pytest.approx(expected, abs=1e-6)
    shares = np.bincount(labels, minlength=CLASSES) / N
    chance = values_of(scored.scores["chance"])
    assert chance["accuracy"] == pytest.approx(shares.max())
    assert chance["cross_entropy"] == pytest.approx(entr(shares).sum())
    assert chance["agreement"] == pytest.approx(np.bincount(target.argmax(-1).numpy()).max() / N)
    assert 0 < scored["agreement"].value < 1


def test_the_mean_baseline_is_the_mean_of_the_target_training_rows(
    stitched: StitchedModel, b: Adapter, data: Any
) -> None:
    y = b.encode(torch.stack([s["image"] for s in data[N:]]), LAYER)[LAYER]
    torch.testing.assert_close(stitched.stitch.body_mean, y.rows("none").mean(0))
    torch.testing.assert_close(stitched.stitch.prefix_mean, y.prefix()[:, 0].mean(0))


def test_intervals_match_a_bootstrap_over_samples(
    stitched: StitchedModel, scored: Evaluation, b: Adapter, data: Any
) -> None:
    pixels = torch.stack([s["image"] for s in data[:N]])
    with torch.no_grad():
        agrees = (stitched(pixel_values=pixels).logits.argmax(-1) == b.model(pixels).logits.argmax(-1)).numpy()
    drawn = [agrees[np.random.default_rng(i).integers(0, N, N)].mean() for i in range(4000)]
    score = scored["agreement"]
    assert [score.low, score.high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=1.6 / N)


def test_intervals_contain_the_value_shrink_with_n_and_depend_on_the_seed(
    stitched: StitchedModel, scored: Evaluation, b: Adapter, data: Any
) -> None:
    for figures in scored.scores.values():
        for score in figures.values():
            assert score.low <= score.value <= score.high
    again, other, few = (
        evaluate(stitched, part, target=b, seed=seed, progress=False)
        for part, seed in ((data[:N], 0), (data[:N], 1), (data[:15], 0))
    )
    assert again == scored and other != scored
    assert all(values_of(row) == values_of(scored.scores[who]) for who, row in other.scores.items())
    assert few["agreement"].high - few["agreement"].low > scored["agreement"].high - scored["agreement"].low


def test_a_single_sample_has_no_intervals(stitched: StitchedModel, b: Adapter, data: Any) -> None:
    one = evaluate(stitched, data[:1], target=b, progress=False)
    scores = [score for figures in one.scores.values() for score in figures.values()]
    assert np.isnan([(score.low, score.high) for score in scores]).all()
    assert str(one.scores["target"]["agreement"]) == "1.000 [–]"
    assert one.no_better == ("identity", "mean_only", "chance")


def test_a_model_is_scored_in_eval_mode_and_its_modes_are_restored(b: Adapter, data: Any) -> None:
    model = hf_stitch.stitch(b, b, data, matcher="identity", **CUT).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.9
    model.source.training = False
    modes = [module.training for module in model.modules()]
    assert evaluate(model, data[:N], target=b, progress=False)["agreement"].value == 1.0
    assert [module.training for module in model.modules()] == modes


def test_a_target_that_is_not_the_recorded_one_is_warned_of(
    stitched: StitchedModel, a: Adapter, b: Adapter, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match=r"not the target .* differs in weights \(hash .*, now ") as seen:
        assert whole_target(stitched, a) is a
    assert len(seen) == 1
    relu = copy.deepcopy(b.model)
    relu.config.hidden_act = "relu"
    with pytest.warns(UserWarning, match=r"differs in config \(hidden_act 'gelu', now 'relu'; "):
        evaluate(stitched, data[:N], target=relu, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole_target(stitched, b.model)
        reference = {**stitched.config.target["reference"], "weights_hash": None}
        monkeypatch.setitem(stitched.config.target, "reference", reference)
        whole_target(stitched, a)


def test_agreement_and_divergence_are_the_only_figures_without_labels(
    stitched: StitchedModel, scored: Evaluation, b: Adapter, data: Any
) -> None:
    unlabelled = evaluate(stitched, [s["image"] for s in data[:N]], target=b, progress=False)
    figures = {who: tuple(found) for who, found in unlabelled.scores.items()}
    assert figures.pop("chance") == ("agreement",)
    assert {*figures.values()} == {("agreement", "kl_divergence")}
    assert all(unlabelled[figure] == scored[figure] for figure in ("agreement", "kl_divergence"))


def test_relative_accuracy_is_nan_if_the_target_is_never_correct(
    stitched: StitchedModel, b: Adapter, data: Any
) -> None:
    with torch.no_grad():
        predicted = b.model(torch.stack([s["image"] for s in data[:N]])).logits.argmax(-1).tolist()
    wrong = [{**s, "label": (label + 1) % CLASSES} for s, label in zip(data, predicted, strict=False)]
    found = evaluate(stitched, wrong, target=b, progress=False)
    assert np.isnan([found["relative_accuracy"].value, found["relative_accuracy"].low]).all()


@pytest.mark.parametrize(("side", "what"), [("source", "layer 'vit.layers.0' of the source is"), ("target", "logits")])
def test_a_sample_that_overflows_in_a_network_is_named(
    side: str, what: str, stitched: StitchedModel, b: Adapter, data: Any
) -> None:
    ids = [f"n{i}" for i in range(N)]
    rows = [dict(sample) for sample in data[:N]]
    rows[7]["image"] = torch.full((3, 16, 16), 3e38)
    broken, whole = Samples.of(rows, id=ids), Samples.of(data[:N], id=ids)
    sides = (broken, whole) if side == "source" else (whole, broken)
    with pytest.raises(ValueError, match=f"(?s){what}.* NaN or infinite for .*'n7'"):
        evaluate(stitched, sides[0], target=b, paired_data=sides[1], progress=False)


def test_an_evaluation_converts_to_pandas_text_and_figure(scored: Evaluation) -> None:
    frame = scored.to_pandas()
    assert list(frame.columns) == ["predictor", "figure", "value", "low", "high"]
    assert len(frame) == 6 * 5 - 1  # chance has no divergence
    row = frame[(frame.predictor == "identity") & (frame.figure == "agreement")].iloc[0]
    assert row.value == scored.scores["identity"]["agreement"].value
    assert "60 held-out samples" in str(scored)
    for word in (*scored.scores, "relative accuracy", *str(scored["accuracy"]).split(" [")):
        assert word in str(scored)
    (axes,) = scored.plot("agreement").axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [who.replace("_", " ") for who in scored.scores]
    for figure in scored.scores["stitched"]:  # of those that have it
        shown = [text.get_text() for text in scored.plot(figure).axes[0].get_yticklabels()]
        assert shown == [who.replace("_", " ") for who, row in scored.scores.items() if figure in row]
    assert "chance" not in [text.get_text() for text in scored.plot("kl_divergence").axes[0].get_yticklabels()]
    with pytest.raises(KeyError, match=r"the evaluation has no figure 'f1'; it has accuracy, .*, kl_divergence"):
        scored.plot("f1")


# -- target --------------------------------------------------------------------------------------------------------


def test_a_loaded_model_needs_the_target_if_it_has_no_name(
    stitched: StitchedModel, scored: Evaluation, a: Adapter, b: Adapter, data: Any, tmp_path: Any
) -> None:
    stitched.save_pretrained(tmp_path)
    again = StitchedModel.from_pretrained(tmp_path)
    assert evaluate(again, data[:N], target=b.model, source=a.model, progress=False) == scored
    without = evaluate(again, data[:N], target=b.model, progress=False)
    assert without.left_out == {"source": "it is not in memory; pass the whole source"}
    assert {**without.scores, "source": scored.scores["source"]} == scored.scores
    with pytest.raises(ValueError, match="pass it, as target=…"):
        evaluate(again, data[:N], progress=False)


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
    with pytest.raises(ValueError, match="no text has a second token to predict, neither sample 0 nor any other"):
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
        (9, "sample 3 has label 9, and the target predicts classes 0 to 3"),
        (-1, "sample 3 has the label -1"),
        (None, "the two sides differ first at place 0"),
    ],
)
def test_samples_that_cannot_be_scored_are_rejected(
    label: int | None, message: str, stitched: StitchedModel, b: Adapter, data: Any
) -> None:
    wrong = [{**sample, "label": label if i == 3 and label else 0} for i, sample in enumerate(data[:N])]
    other = None if label else Samples.of(data).select(range(1, N + 1))
    with pytest.raises(ValueError, match=message):
        evaluate(stitched, Samples.of(wrong), target=b, paired_data=other, progress=False)
