"""Scores of stitched models without a head, compared with NumPy and scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn

import hf_stitch
from hf_stitch import Adapter, StitchedModel, evaluate
from hf_stitch.analysis import bootstrap
from hf_stitch.tasks.vectors import Vectors

N = 120
CUT = {"source_layer": "1", "target_layer": "1", "progress": False}


def drawn_cka(own: Tensor, target: Tensor, resamples: int) -> np.ndarray:
    measured = {"stitched": {"vector": own}, "target": {"vector": target}}
    return Vectors().drawn(measured, resamples=resamples, seed=0)["stitched"]["cka"]


def net(seed: int, width: int = 8, last: nn.Module | None = None) -> Adapter:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 6), last or nn.Identity()).double()
    return hf_stitch.load(model, example_inputs=torch.zeros(2, 4, dtype=torch.float64))


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return torch.randn(400, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture(scope="module")
def stitched(rows: Tensor) -> StitchedModel:
    return hf_stitch.stitch(net(0), net(1), rows[N:], test_data=rows[:N], **CUT)


def test_figures_match_numpy_and_scikit_learn(stitched: StitchedModel, rows: Tensor) -> None:
    found = stitched.evaluation
    assert found.task == "feature-extraction" and found.n == N
    assert list(found.scores) == ["stitched", "identity", "mean_only", "chance"]
    assert stitched.parents is not None
    with torch.no_grad():
        y, z = stitched.parents[1].model(rows[:N]).numpy(), stitched(input=rows[:N]).numpy()
    mean = y.mean(0)
    unit_y, unit_z = ((side - mean) / np.linalg.norm(side - mean, axis=1, keepdims=True) for side in (y, z))
    near = [NearestNeighbors(metric="cosine").fit(side - mean).kneighbors(None, 10, False) for side in (y, z)]
    centred_y, centred_z = y - mean, z - z.mean(0)
    product, own_y, own_z = (
        np.linalg.norm(a.T @ b) ** 2
        for a, b in ((centred_y, centred_z), (centred_y, centred_y), (centred_z, centred_z))
    )
    expected = {
        "r2": r2_score(y, z, multioutput="variance_weighted"),
        "cosine": (unit_y * unit_z).sum(1).mean(),
        "cka": product / np.sqrt(own_y * own_z),
        "knn_overlap": np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(*near, strict=True)]),
    }
    assert {figure: score.value for figure, score in found.scores["stitched"].items()} == pytest.approx(expected)


def test_baselines_are_at_their_levels(stitched: StitchedModel) -> None:
    scores = stitched.evaluation.scores
    assert abs(scores["mean_only"]["r2"].value) < 0.15 and np.isnan(scores["mean_only"]["cka"].value)
    assert "–" in str(stitched.evaluation)
    chance = scores["chance"]
    assert chance["knn_overlap"].low < 10 / (N - 1) < chance["knn_overlap"].high
    assert chance["r2"].value < 0 and chance["cka"].value < 0.1
    for figure in ("r2", "cosine", "cka", "knn_overlap"):
        assert scores["stitched"][figure].low > chance[figure].high


def test_intervals_of_cka_are_as_wide_as_those_of_the_half_sample_bootstrap() -> None:
    x = torch.randn(300, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x + 1.5 * torch.randn(300, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = drawn_cka(x, y, 500)
    reference = bootstrap("linear_cka", x, y, resamples=500)
    assert drawn[0] == pytest.approx(reference.value)
    assert 0.8 < drawn[1:].std() / reference.standard_error < 1.25


def test_both_ways_to_compute_cka_agree() -> None:
    wide = torch.randn(20, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    other = torch.randn(20, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    of_narrow = torch.linalg.qr(torch.cat([wide, other]).T).R.T
    found, padded = drawn_cka(wide, other, 5), drawn_cka(of_narrow[:20], of_narrow[20:], 5)
    np.testing.assert_allclose(padded, found, rtol=1e-9)


def test_an_identity_between_unequal_widths_is_left_out_with_a_reason(rows: Tensor) -> None:
    unequal = hf_stitch.stitch(net(0), net(1, 12), rows, **CUT)
    assert unequal.evaluation.left_out == {"identity": "the widths of both layers differ"}
    assert "identity" not in unequal.evaluation.scores
    assert "no identity: the widths of both layers differ" in str(unequal.evaluation)


class _Named(nn.Module):
    """Output as of a text encoder, with other parts before the one that counts."""

    def forward(self, x: Tensor) -> Any:
        wide = torch.stack([x, 3 * x], 1)
        return {"ids": torch.zeros(len(x), dtype=torch.long), "pooler_output": 0 * x, "last_hidden_state": wide}


class _Paired(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.sum(), (x.long(), [2 * x])


class _Columns(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.sum(0)


@pytest.mark.parametrize("last", [_Named(), _Paired()])
def test_outputs_of_other_types_become_vectors(stitched: StitchedModel, rows: Tensor, last: nn.Module) -> None:
    other = hf_stitch.stitch(net(0), net(1, last=last), rows[N:], test_data=rows[:N], **CUT)
    assert other.evaluation is not None
    for figure, score in stitched.evaluation.scores["stitched"].items():
        assert other.evaluation.scores["stitched"][figure].value == pytest.approx(score.value)


def test_a_model_whose_output_has_no_vectors_is_told_not_scored(rows: Tensor) -> None:
    with pytest.warns(UserWarning, match="not scored: an output of type Tensor must contain .* wrap the target"):
        model = hf_stitch.stitch(net(0), net(1, last=_Columns()), rows, **CUT)
    assert model.evaluation is None
    with pytest.raises(ValueError, match="a floating-point tensor with a row for each of 64 samples"):
        evaluate(model, rows, progress=False)


def test_a_source_is_refused_because_its_output_is_not_compared(stitched: StitchedModel, rows: Tensor) -> None:
    for plan in (True, False):
        with pytest.raises(ValueError, match="source requires a model with a head"):
            evaluate(stitched, rows[:N], source=net(0), plan=plan, progress=False)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_samples_leave_figures_undefined(stitched: StitchedModel, rows: Tensor, n: int) -> None:
    scores = evaluate(stitched, rows[:n], progress=False, resamples=5).scores["stitched"]
    assert np.isnan(scores["knn_overlap"].value) == (n < 100)
    assert np.isnan(scores["r2"].value) == (n == 1)
