"""Image experiments of relative representations: their scripts, estimates, verdicts and pages."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import study
import torch
from sklearn.metrics import f1_score
from study_scripts import SHARED, run_script

pytestmark = pytest.mark.slow

TASKS = ("cifar10", "cifar100", "fashion_mnist")
CUTS = ("bn5", "bn6", "final")
EXPERIMENTS = {
    "cross_seed": [f"cross_seed_{task}_{cut}" for task in TASKS for cut in CUTS],
    "cross_architecture_images": [f"cross_architecture_{task}_{cut}" for task in TASKS for cut in CUTS],
    "angles": ["angles"],
    "anchor_study": ["anchors_number"],
    "similarity_signal": ["similarity_signal"],
}
"""Script -> its figures with published networks."""


def imported(name: str) -> Any:
    """Import a script."""
    return importlib.import_module(f"relative_representations.{name}")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of trained encoders and vectors, shared by the experiments."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.skipif(not (SHARED.is_dir()), reason="there is no ../shared with data and networks")
@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_writes_record_page_and_figures(name: str, published: bool, cache: Path, tmp_path: Path) -> None:
    options = ["--published", SHARED / "models"] if published else []
    run_script(
        f"relative_representations.{name}",
        "--preset",
        "test",
        "--data-dir",
        SHARED / "data",
        "--cache",
        cache,
        "--out",
        tmp_path,
        *options,
    )
    pictures = {path.stem for path in tmp_path.glob("*.png")}
    assert pictures == set(EXPERIMENTS[name]) if published else pictures <= set(EXPERIMENTS[name])
    assert json.loads((tmp_path / f"{name}.json").read_text())["preset"] == "test"
    assert "nan" not in (tmp_path / f"{name}.md").read_text()


def test_weighted_f1_is_that_of_scikit_learn() -> None:
    truth, guesses = torch.randint(0, 5, (200,)), torch.randint(0, 4, (200,))
    found = imported("swapping").scored(truth, guesses)
    assert found["f1"] == pytest.approx(100 * f1_score(truth, guesses, average="weighted", zero_division=0))
    assert found["accuracy"] == pytest.approx(100 * (truth == guesses).double().mean().item())


def test_kept_share_is_above_chance() -> None:
    pairs = imported("kept").Pairs(["network"] * 3)
    found = pairs.kept(np.full((3, 3), 50.0) + 40 * np.eye(3), 10.0)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_pairs_between_groups_leave_out_pairs_within() -> None:
    pairs = imported("kept").Pairs(["one", "one", "other"], between=True)
    values = np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 3.0], [np.nan, 5.0, 0.0]])
    found = pairs.mean(values)
    assert found.value == pytest.approx(3)
    assert 1 <= found.low < found.value < found.high <= 5


def test_intervals_follow_the_networks() -> None:
    kept = imported("kept")
    quality = np.arange(8.0)
    found = kept.Pairs(["network"] * 8).mean(np.broadcast_to(quality, (8, 8)))
    standard_error = quality.std() / np.sqrt(8)
    assert found.value == pytest.approx(quality.mean())
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * standard_error, rel=0.15)


@pytest.mark.parametrize(
    ("relative", "absolute", "untrained", "verdict"),
    [
        (85.0, 10.0, 12.0, "confirmed"),
        (60.0, 10.0, 12.0, "in part"),
        (85.0, 40.0, 12.0, "in part"),
        (85.0, 10.0, 88.0, "in part"),
        (10.0, 10.0, 12.0, "refuted"),
    ],
)
def test_verdict_on_other_seeds(relative: float, absolute: float, untrained: float, verdict: str) -> None:
    def scores(method: str, stitched: float, encoders: str = "trained") -> list[dict[str, Any]]:
        f1 = np.full((3, 3), stitched)
        np.fill_diagonal(f1, 90.0 if method != "chance" else stitched)
        places = [{"task": task, "cut": cut} for task in TASKS for cut in CUTS]
        return [{**place, "method": method, "encoders": encoders, "f1": f1.tolist()} for place in places]

    record = {
        "networks": ["a", "b", "c"],
        "untrained": ["d", "e", "f"],
        "cuts": list(CUTS),
        "scores": scores("relative", relative)
        + scores("absolute", absolute)
        + scores("chance", 10.0)
        + scores("relative", untrained, "untrained"),
    }
    assert study.decided(imported("cross_seed").parts(record)) == verdict


@pytest.mark.parametrize(
    ("cosine", "shuffled", "f1", "verdicts"),
    [
        (0.8, 0.1, 52.0, ("confirmed", "confirmed")),
        (0.8, 0.1, 30.0, ("confirmed", "refuted")),
        (0.2, 0.1, 60.0, ("refuted", "confirmed")),
        (0.8, 0.9, 60.0, ("refuted", "confirmed")),
    ],
)
def test_verdicts_on_the_training_signal(cosine: float, shuffled: float, f1: float, verdicts: tuple[str, str]) -> None:
    script = imported("similarity_signal")
    students = {kind: {"relative_cosine": 0.1, "f1": 10.0} for kind in script.STUDENTS}
    students[script.SIGNAL] = {"relative_cosine": cosine, "f1": f1}
    students[script.SHUFFLED]["relative_cosine"] = shuffled
    record = {"references": [{"labelled": 60.0, "chance": 10.0, "students": students}] * 2}
    found = [row["verdict"].removeprefix("stand-in ") for row in script.claims(record)]
    assert tuple(found) == verdicts


def test_angles_are_compared_with_untrained_networks_of_their_kind() -> None:
    script = imported("angles")

    def row(networks: str, measure: str, value: float) -> dict[str, Any]:
        place = {"modality": "text", "data": "TREC", "cut": "words", "networks": networks, "centre": "origin"}
        values = np.full((4, 4), value)
        return {**place, "measure": measure, "values": (values if networks == "trained" else values[:2, :2]).tolist()}

    record = {
        "networks": {"text": {"trained": ["bert", "bert", "electra", "electra"], "untrained": ["bert", "bert"]}},
        "scores": [
            row("trained", "correlation", 0.8), row("untrained", "correlation", 0.5), row("trained", "difference", 9.0),
            row("trained", "difference, paired at random", 12.0),
        ],
    }  # fmt: skip
    found = script.Measured(record, "text")
    assert found.cells == [("TREC", "words")]
    assert found.more("other architectures", found.cells[0]).value == pytest.approx(0.3)
    assert [found.preserved(kind, found.cells[0]) for kind in script.KINDS] == [True, True]
    record["scores"][1] = row("untrained", "correlation", 0.9)
    assert script.Measured(record, "text").preserved("other seeds", found.cells[0]) is False


def test_pixels_of_all_data_sets_become_rgb_of_one_size() -> None:
    from PIL import Image

    import hf_stitch

    images = imported("images")
    grey = hf_stitch.Samples.of([Image.new("L", (28, 28), 255)] * 2)
    found = images.squares(grey)
    assert found.shape == (2, 3, 32, 32)
    assert found[..., 2:30, 2:30].min() == 255
    assert found[..., 0].max() == 0
