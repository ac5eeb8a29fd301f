"""The permutation test of the most similar pairs of layers, compared with NumPy and with its null distribution."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

import hf_stitch
from hf_stitch import compare
from hf_stitch.analysis import Activations, SimilarityAtlas
from hf_stitch.analysis.permutation import maximum_test
from hf_stitch.registry import registries

PLENTY = 2**30


def layers(n: int, *widths: int, seed: int) -> list[Tensor]:
    """Layers of one network, which share most of their variation."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(n, 2, generator=generator)
    return [
        (
            common @ torch.randn(2, width, generator=generator) + 0.2 * torch.randn(n, width, generator=generator)
        ).double()
        for width in widths
    ]


def cka(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(0), y - y.mean(0)
    return float((x.T @ y).__pow__(2).sum() / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y))


@pytest.mark.parametrize("metric", ["procrustes", "linear_cka"])
def test_a_long_test_says_what_it_takes_and_how_far_it_is(
    metric: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = layers(18, 3, 8, seed=0), layers(18, 4, 6, 5, seed=1)
    a, b = (Activations({str(i): rows for i, rows in enumerate(side)}, range(18)) for side in (x, y))
    compare(a, b, metrics=[metric], permutations=19)
    assert not capsys.readouterr().err
    for place in ("printing", "analysis.comparison.comparing"):
        monkeypatch.setattr(f"hf_stitch.{place}.SILENT", 0)
    compare(a, b, metrics=[metric], permutations=19)
    told = capsys.readouterr().err.splitlines()
    assert re.match(r"19 permutations of 2 × 3 pairs of layers take about \S+ minutes after the samples are", told[0])
    assert any(line.startswith("comparing: 18 of 18 samples") for line in told)
    assert any(line.startswith(f"permuting, {metric}: ") for line in told)
    assert f"permuting, {metric}: 120 of 120 values" in told[-1]
    compare(a, b, metrics=[metric], permutations=19, progress=False)
    assert not capsys.readouterr().err


def test_p_values_equal_those_of_numpy() -> None:
    n, count = 18, 39
    x, y = layers(n, 3, 8, seed=0), layers(n, 4, 6, 5, seed=1)
    y[1][:, :2] += 0.6 * x[0][:, :2]  # two layers are related
    found = maximum_test(registries.metrics.build("linear_cka"), x, y, permutations=count, seed=7, memory=PLENTY)
    random = np.random.default_rng(7)
    orders = [np.arange(n), *(random.permutation(n) for _ in range(count))]
    values = np.array([[[cka(a.numpy(), b.numpy()[order]) for b in y] for a in x] for order in orders])
    scores = (values - values.mean(0)) / values.std(0)
    np.testing.assert_allclose(found.scores, scores[0], rtol=1e-9)
    np.testing.assert_allclose(found.chance, values.mean(0), rtol=1e-9)
    want = (1 + (scores.reshape(1 + count, -1).max(1)[1:, None, None] >= scores[0] - 1e-9).sum(0)) / (1 + count)
    np.testing.assert_allclose(found.p_values, want)
    np.testing.assert_allclose(found.unadjusted, (1 + (scores[1:] >= scores[0] - 1e-9).sum(0)) / (1 + count))
    places = values[0].argmax(1)
    of_rows = [(1 + (scores[1:, i].max(1) >= scores[0, i, places[i]] - 1e-9).sum()) / (1 + count) for i in range(2)]
    np.testing.assert_allclose(found.match_p_values(places, "a"), of_rows)
    assert (found.p_values >= found.unadjusted).all()


@pytest.mark.parametrize("name", ["linear_cka", "linear_cka:debiased=True", "rbf_cka", "rsa", "rsa:compare=pearson"])
def test_matrices_of_samples_give_the_values_of_the_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metric = registries.metrics.build(name)
    x, y = layers(15, 3, 20, 6, seed=2), layers(15, 4, 7, seed=3)
    by_matrices = maximum_test(metric, x, y, permutations=9, seed=0, memory=PLENTY)
    in_blocks = maximum_test(metric, x, y, permutations=9, seed=0, memory=8 * 15**2 * 12)  # one layer at a time
    np.testing.assert_allclose(in_blocks.maxima, by_matrices.maxima, rtol=1e-12)
    monkeypatch.setattr(type(metric), "sample_matrix", lambda *_: None)
    by_pairs = maximum_test(metric, x, y, permutations=9, seed=0, memory=PLENTY)
    for field in ("chance", "scores", "unadjusted", "maxima", "maxima_a", "maxima_b"):
        np.testing.assert_allclose(getattr(by_matrices, field), getattr(by_pairs, field), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["linear_cka", "linear_cka:debiased=True", "rbf_cka"])
def test_a_layer_that_outputs_a_constant_is_refused(name: str) -> None:
    x, y = torch.randn(12, 3), torch.ones(12, 4)
    with pytest.raises(ValueError, match="cka"):
        maximum_test(registries.metrics.build(name), [x], [y], permutations=9, seed=0, memory=2**30)


def test_p_of_the_maximum_is_uniform_between_unrelated_networks() -> None:
    """The layers of a network are alike, so that a permutation of its own for each pair would not do."""
    metric, count, trials = registries.metrics.build("linear_cka"), 9, 600
    smallest, of_first_layer = np.empty(trials), np.empty(trials)
    for trial in range(trials):
        x, y = layers(12, 3, 4, 6, seed=2 * trial), layers(12, 5, 3, 4, seed=2 * trial + 1)
        found = maximum_test(metric, x, y, permutations=count, seed=trial, memory=PLENTY)
        smallest[trial] = found.p_values.min()
        of_first_layer[trial] = found.match_p_values(found.scores.argmax(1), "a")[0]
    for p_values in (smallest, of_first_layer):
        assert chisquare(np.bincount(np.rint(10 * p_values).astype(int), minlength=11)[1:]).pvalue > 1e-4


def test_a_related_narrow_pair_is_found_beside_a_wide_unrelated_one() -> None:
    """Biased CKA of two wide layers is higher by chance than that of the related pair."""
    generator = torch.Generator().manual_seed(0)
    narrow, wide_a, wide_b = (torch.randn(40, width, generator=generator) for width in (3, 400, 400))
    related = 0.7 * narrow + torch.randn(40, 3, generator=generator)
    found = maximum_test(
        registries.metrics.build("linear_cka"), [narrow, wide_a], [related, wide_b], permutations=99, seed=0,
        memory=PLENTY,
    )  # fmt: skip
    assert found.chance[1, 1] > cka(narrow.numpy(), related.numpy()) + 0.3
    assert found.p_values[0, 0] == 0.01 and found.p_values[1, 1] > 0.1


def test_an_atlas_contains_its_test() -> None:
    x, y = layers(30, 3, 5, seed=0), layers(30, 4, 6, 5, seed=1)
    y[2] = torch.cat([x[1], y[2]], 1)
    a = Activations({f"a{i}": rows for i, rows in enumerate(x)}, range(30))
    b = Activations({f"b{i}": rows for i, rows in enumerate(y)}, range(30))
    atlas = compare(a, b, metrics=["procrustes", "linear_cka:debiased=True"], permutations=99, seed=3, progress=False)
    assert atlas.recipe["permutations"] == 99 and atlas.recipe["seed"] == 3
    for metric in atlas.values:
        p_values, matches = atlas.p_values(metric), atlas.match_p_values(metric)
        assert p_values.shape == (2, 3) and p_values[1, 2] == 0.01 == matches["a1"]
        assert atlas.best_matches(metric)["a1"] == "b2" and matches["a0"] >= 0.01
        assert set(atlas.match_p_values(metric, "b")) == {"b0", "b1", "b2"}
        np.testing.assert_array_equal(atlas.to_pandas().query("metric == @metric")["p_value"], p_values.ravel())
    again = SimilarityAtlas.from_dict(atlas.to_dict())
    np.testing.assert_array_equal(again.p_values("procrustes"), atlas.p_values("procrustes"))
    assert "p = 0.01" in str(again) and "99 permutations" in str(again)


def test_a_comparison_without_a_test_says_how_to_run_one() -> None:
    side = Activations({"a": torch.randn(9, 3)}, range(9))
    plain = compare(side, side, progress=False)
    assert not plain.tests and list(plain.to_pandas().columns) == ["metric", "layer_a", "layer_b", "value"]
    with pytest.raises(ValueError, match=r"lacks a permutation test; run compare\(…, permutations=200\)"):
        plain.p_values()
    with pytest.raises(ValueError, match="one row per sample: use rows='mean'"):
        compare(side, side, rows="resized", permutations=9)
    with pytest.raises(ValueError, match="permutations must be an integer >= 0"):
        compare(side, side, permutations=-1)
    assert hf_stitch.plan(compare, side, side, permutations=99).seconds > 0
