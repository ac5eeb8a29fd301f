"""Scores of retrieval agree with the metrics of hf-stitch and a plain computation; alignment finds translations."""

from __future__ import annotations

import pytest
import torch
from hf_stitch_word_vectors import WordVectors, align, retrieval_scores
from hf_stitch_word_vectors.retrieval import nearest_words
from torch import Tensor

from hf_stitch import metrics


@pytest.fixture(scope="module")
def pair() -> tuple[Tensor, Tensor]:
    """Vectors and the same with noise."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(700, 6, generator=draws, dtype=torch.float64)
    return x, x + 0.8 * torch.randn(700, 6, generator=draws, dtype=torch.float64)


def _plain(x: Tensor, y: Tensor, k: int, csls: bool) -> tuple[float, float, float]:
    """Jaccard, without the word itself, and MRR, computed word by word."""
    x, y = (side / side.norm(dim=1, keepdim=True) for side in (x, y))
    across, own = x @ y.T, y @ y.T
    if csls:
        rx, ry = across.topk(10, 1).values.mean(1), across.topk(10, 0).values.mean(0)
        across = 2 * across - rx[:, None] - ry
    jaccard, others, mrr = [], [], []
    for row in range(len(x)):
        found, near = across[row].argsort(descending=True).tolist(), own[row].argsort(descending=True).tolist()
        mrr.append(1 / (found.index(row) + 1) if row in found[:k] else 0)
        for scores, sides in ((jaccard, (found, near)), (others, [[p for p in s if p != row] for s in (found, near)])):
            one, other = (set(side[:k]) for side in sides)
            scores.append(len(one & other) / len(one | other))
    return tuple(sum(values) / len(values) for values in (jaccard, others, mrr))


@pytest.mark.parametrize("csls", [False, True])
def test_scores_are_those_of_a_plain_computation(pair: tuple[Tensor, Tensor], csls: bool) -> None:
    scores = retrieval_scores(*pair, csls=csls)
    for k in (5, 10):
        found = (scores.jaccard[k], scores.neighbours[k], scores.mrr[k])
        assert found == pytest.approx(_plain(*pair, k, csls), abs=1e-12)
    assert scores.n == scores.among == 700


def test_scores_are_those_of_the_metrics_of_hf_stitch(pair: tuple[Tensor, Tensor]) -> None:
    scores = retrieval_scores(*pair)
    for k in (5, 10):
        assert scores.mrr[k] == pytest.approx(metrics.mrr(*pair, k=k).item(), abs=1e-12)
    assert scores.cosine == pytest.approx(metrics.paired_cosine(*pair).item(), abs=1e-12)


def test_anchors_are_left_out_and_queries_searched_among_all_others(pair: tuple[Tensor, Tensor]) -> None:
    words = [f"w{number}" for number in range(700)]
    x, y = pair
    scores = retrieval_scores(x, y, 5, words=words, exclude=words[:50])
    assert scores == retrieval_scores(x[50:], y[50:], 5)
    some = retrieval_scores(x, y, 5, exclude=range(50), queries=torch.arange(0, 100))
    assert (some.n, some.among) == (50, 650)
    halves = [retrieval_scores(x, y, 5, queries=torch.arange(*part)) for part in ((0, 350), (350, 700))]
    assert sum(half.mrr[5] for half in halves) / 2 == pytest.approx(retrieval_scores(x, y, 5).mrr[5])


def test_equal_spaces_score_1_and_collapsed_ones_0(pair: tuple[Tensor, Tensor]) -> None:
    x, _ = pair
    same = retrieval_scores(2 * x, x)
    assert set((same.jaccard | same.neighbours | same.mrr).values()) == {1.0}
    assert retrieval_scores(torch.ones(50, 3), torch.ones(50, 3)).mrr == {5: 0.0, 10: 0.0}


def test_csls_helps_where_one_row_is_near_to_all() -> None:
    draws = torch.Generator().manual_seed(0)
    y = torch.randn(300, 20, generator=draws)
    x = y + 1.2 * torch.randn(300, 20, generator=draws) + 1.5
    y[0] = 2.0
    assert retrieval_scores(x, y, 5, csls=True).mrr[5] > retrieval_scores(x, y, 5).mrr[5] + 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 700}, "k must be from 1 to 699"),
        ({"k": 0}, "k must be"),
        ({"words": ["a"]}, "one word per row .700., got 1"),
        ({"exclude": ["a"]}, "1 unknown ones, for example 'a'"),
    ],
)
def test_wrong_arguments_are_refused(pair: tuple[Tensor, Tensor], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        retrieval_scores(*pair, **options)


def test_rows_without_direction_and_other_shapes_are_refused(pair: tuple[Tensor, Tensor]) -> None:
    x, y = pair
    with pytest.raises(ValueError, match="the same shape"):
        retrieval_scores(x[:, :3], y)
    with pytest.raises(ValueError, match=r"rows of target must be .* row 3"):
        retrieval_scores(x, y.index_fill(0, torch.tensor([3]), 0))


def test_the_nearest_words_are_found(pair: tuple[Tensor, Tensor]) -> None:
    x, y = pair
    cosines = torch.nn.functional.cosine_similarity(x[:, None], y[None], dim=2)
    assert torch.equal(nearest_words(x, y, 3), cosines.topk(3).indices)


@pytest.fixture(scope="module")
def languages() -> tuple[WordVectors, WordVectors, list[tuple[str, str]]]:
    """Two languages whose vectors are the same up to rotation and noise, and the whole dictionary."""
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(200, 10, generator=draws)
    y = x @ torch.linalg.qr(torch.randn(10, 10, generator=draws)).Q + 0.1 * torch.randn(200, 10, generator=draws)
    words = [(f"word{number}", f"wort{number}") for number in range(200)]
    return WordVectors.of([a for a, _ in words], x), WordVectors.of([b for _, b in words], y), words


@pytest.mark.parametrize("matcher", ["procrustes", "ridge", "lstsq"])
@pytest.mark.parametrize("csls", [False, True])
def test_a_small_dictionary_aligns_two_languages(
    languages: tuple[WordVectors, WordVectors, list[tuple[str, str]]], matcher: str, csls: bool
) -> None:
    a, b, words = languages
    aligned = align(a, b, words[:40], matcher)
    found = aligned.precision(words[40:], csls=csls)
    assert 0.9 < found[1] <= found[5] <= 1
    assert aligned.translate(["word50"], 3, csls=csls)["word50"][0] == "wort50"
    shuffled = align(a, b, zip([w for w, _ in words[:40]], [w for _, w in words[1:41]], strict=True), matcher)
    assert shuffled.precision(words[41:])[1] < 0.2


def test_any_right_translation_counts(languages: tuple[WordVectors, WordVectors, list[tuple[str, str]]]) -> None:
    a, b, words = languages
    aligned = align(a, b, words[:40])
    assert aligned.precision([("word50", "wort3"), ("word50", "wort50")]) == {1: 1.0, 5: 1.0}


def test_dictionaries_are_checked(languages: tuple[WordVectors, WordVectors, list[tuple[str, str]]]) -> None:
    a, b, words = languages
    with pytest.raises(ValueError, match="dictionary must not be empty"):
        align(a, b, [])
    with pytest.raises(ValueError, match="not have a vector: 'nothing'"):
        align(a, b, [("nothing", "wort1")])
    with pytest.raises(ValueError, match="closed form"):
        align(a, b, words, "task_loss")
    with pytest.raises(ValueError, match="dictionary must not be empty"):
        align(a, b, words[:40]).precision([])
