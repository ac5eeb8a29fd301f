"""Arguments of grids that cannot give a result are refused before any network runs on the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hf_stitch
from hf_stitch.analysis.grid import StitchGrid

GENERATOR = torch.Generator().manual_seed(0)
POINTS = torch.randn(120, 4, generator=GENERATOR)
FAR = POINTS[:40] + 9
SAMPLES = hf_stitch.Samples.of(POINTS, label=[0, 1] * 60)
TRAIN, TEST = SAMPLES.take(80), SAMPLES.select(range(80, 120))


def net(seed: int = 0) -> hf_stitch.Adapter:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    return hf_stitch.load(model, example_inputs=POINTS[:2])


def grid(**options: Any) -> StitchGrid:
    options = {"layers_a": ["1", "3"], "layers_b": ["1"], "task": "image-classification", **options}
    data = options.pop("data", TRAIN)
    return hf_stitch.stitch_grid(net(), net(1), data, resamples=options.pop("resamples", 5), progress=False, **options)


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch of the data may be preprocessed."""

    def run(*_: Any) -> None:
        raise AssertionError("a network runs on the data")

    monkeypatch.setattr(hf_stitch.Adapter, "preprocess", run)


@pytest.mark.usefixtures("unused")
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"layers_a": "13"}, TypeError, r"layers_a must be a list or None, got '13'; write \['13'\]"),
        ({"layers_a": ["1", "1"]}, ValueError, "layers_a contains '1' more than once"),
        ({"layers_b": []}, ValueError, "layers_b must contain at least one layer"),
        ({"layers_a": ["9"]}, hf_stitch.NotACutError, "'9'"),
        ({"layers_b": ["9"]}, hf_stitch.NotACutError, "'9'"),
        ({"task": "auto"}, ValueError, "got None; pass task="),
        ({"test_data": TRAIN}, ValueError, "100.0% of test_data are also in data"),
        ({"test_data": TEST, "test_size": 0.2}, ValueError, "test_size and test_data cannot be combined"),
        ({"test_data": POINTS[60:120]}, ValueError, "33.3% of test_data are also in data"),
        ({"matchers": "lstsq"}, TypeError, "matchers must be a list"),
        ({"matchers": ["lstsq", "lstsq"]}, ValueError, "each method once"),
        ({"far_data": FAR}, ValueError, "far_data= requires detectors"),
        ({"detectors": ["energy"]}, ValueError, "energy requires samples of other data; pass auxiliary_data="),
        ({"detectors": ["energy"], "data": POINTS, "auxiliary_data": FAR}, ValueError, "energy requires labels"),
        (
            {"detectors": ["energy"], "auxiliary_data": FAR, "far_data": FAR[:20]}, ValueError,
            "far_data must differ from auxiliary_data, .* shares 100%",
        ),
        ({"detectors": ["knn"], "auxiliary_data": FAR}, ValueError, "auxiliary_data= requires a detector .*, got knn"),
        ({"detectors": ["knn"], "far_data": TRAIN}, ValueError, r"far_data must differ from the data"),
        ({"detectors": ["knn"], "test_data": TEST, "far_data": TEST}, ValueError, "shares 100.0% of its samples"),
    ],
)  # fmt: skip
def test_what_cannot_give_a_result_is_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        grid(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"detectors": ["knn:k=999"]}, r"detector knn\(k=999\) at layer '1' of the target: .* 999 samples"),
        ({"data": hf_stitch.Samples.of(POINTS, label=[0, 2] * 60)}, "target predicts classes 0 to 1"),
    ],
)  # fmt: skip
def test_what_the_data_do_not_allow_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid(**options)


def test_the_recipe_has_what_decides_the_scores() -> None:
    found = grid(test_size=30, resamples=7)
    assert found.recipe["resamples"] == 7 and found.recipe["test_size"] == 30
    assert grid(test_data=TEST).recipe["test_size"] is None


def test_another_number_of_resamples_continues_from_the_same_state(tmp_path: Any) -> None:
    """Resamples are drawn after the passes."""
    grid(checkpoint_dir=tmp_path, resamples=5)
    assert grid(checkpoint_dir=tmp_path, resamples=9).to_dict() == grid(resamples=9).to_dict()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_single_test_sample_has_no_intervals() -> None:
    found = grid(test_data=TEST.take(1), detectors=["knn"])
    for figure in found.figures:
        assert np.isnan(found.cells(figure=figure)[..., 1:]).all()
    assert found.as_good().all() and " [–]" in str(found)
