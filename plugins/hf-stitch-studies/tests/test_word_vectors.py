"""The experiment on word vectors: texts, dictionary, draws, verdict, page, and a run of all on a few words."""

from __future__ import annotations

import gzip
import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import study
import torch
from study_scripts import SHARED, has_keys, run_script

pytestmark = pytest.mark.slow

pytest.importorskip("hf_stitch_word_vectors")


@pytest.fixture(scope="module")
def script() -> Any:
    return importlib.import_module("relative_representations.word_vectors")


def test_texts_become_words_and_halves_have_no_line_in_common(script: Any, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Don't STOP, now!\nalone\n3 apples and 4 pears\n")
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write("The first line\nThe second line\n")
    (tmp_path / "c.md").write_text("not read\n")
    parts = script.parts_of(tmp_path, tmp_path / "cache", None)
    read = {name: path.read_text().splitlines() for name, (path, _) in parts.items()}
    assert read["all"] == ["the first line", "the second line", "don't stop now", "apples and pears"]
    assert sorted(read["even"] + read["odd"]) == sorted(read["all"])
    assert {name: count for name, (_, count) in parts.items()} == {"all": 12, "even": 9, "odd": 3}
    with pytest.raises(SystemExit, match="there is no"):
        script.parts_of(tmp_path / "cache" / "none", tmp_path, None)


def test_packages_become_paragraphs(script: Any) -> None:
    texts = importlib.import_module("relative_representations.debian_texts")
    page = "<html><head><title>no</title></head><p>One &amp;\ntwo.</p><script>no</script><p>Three</p></html>"
    assert texts.of_page(page) == "One & two.\nThree"
    assert texts.of_gcide("Becard \\Be*card\\, n. A bird.\n   [1913 Webster]\n\nNext") == "Becard , n. A bird.\nNext"
    synset = "00001740 03 n 02 entity 0 whole_thing 0 001 ~ 00001930 n 0000 | that which exists  "
    assert texts.of_wordnet(f"  1 a licence\n{synset}\n") == "entity whole thing : that which exists"
    assert texts.of_fortunes("a\nb\n%\nc\n") == "a b\nc"


def test_training_is_repeated_exactly_and_kept(script: Any, tmp_path: Path) -> None:
    words = tmp_path / "tokens.txt"
    words.write_text("\n".join(["red green blue red", "cat dog cow dog"] * 20))
    options = {"vector_size": 4, "min_count": 1, "epochs": 2}
    for algorithm in ("word2vec", "fastText"):
        found = [script.trained(algorithm, 0, words, tmp_path / place, **options) for place in "ab"]
        assert torch.equal(found[0].vectors.weight, found[1].vectors.weight)
        other = script.trained(algorithm, 1, words, tmp_path / "a", **options)
        assert not torch.equal(found[0].vectors.weight, other.vectors.weight)
    assert len(list((tmp_path / "a").glob("*.bin"))) == 4


def test_a_dictionary_is_derived_from_parallel_sentences(script: Any) -> None:
    draws = random.Random(0)
    translations = {f"word{number}": f"wort{number}" for number in range(12)}
    sentences = [draws.sample(list(translations), 4) for _ in range(200)]
    pairs = [(sentence, draws.sample([translations[word] for word in sentence], 4)) for sentence in sentences]
    assert sorted(script.derived(pairs, 3)) == sorted(translations.items())
    assert script.derived(pairs, 500) == []


def test_draws_keep_anchors_and_searched_words_apart(script: Any) -> None:
    words = [f"word{number}" for number in range(200)]
    preset = script.Preset(8, 1, 1, 200, 30, 1, 80)
    draw = script.Draw.of(words, preset, 0)
    searched = torch.cat(draw.queries)
    assert len(draw.anchors.unique()) == 30
    assert len(searched.unique()) == 80
    assert not torch.isin(searched, draw.anchors).any()
    assert [int(band.min() // 50) == int(band.max() // 50) == place for place, band in enumerate(draw.queries)]
    assert not torch.equal(draw.anchors, script.Draw.of(words, preset, 1).anchors)


def test_rotated_vectors_are_found_by_their_anchors_only(script: Any) -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=draws)
    y = 2 * x @ torch.linalg.qr(torch.randn(6, 6, generator=draws)).Q
    draw = script.Draw.of([f"word{number}" for number in range(200)], script.Preset(8, 1, 1, 200, 30, 1, 80), 0)
    found = {name: script.scored(*sides, draw) for name, *sides in script.spaces(x, y, draw, script.MAPS)}
    assert set(found) == {script.ABSOLUTE, script.RELATIVE, script.CENTRED, script.SHUFFLED, *script.MAPS}
    exact = (script.RELATIVE, script.CENTRED, "lstsq", "procrustes", "recoloured")
    assert min(found[name]["mrr 10"] for name in exact) > 0.99
    assert max(found[name]["mrr 10"] for name in (script.ABSOLUTE, script.SHUFFLED, "random")) < 0.2
    bands = [found["lasso"][f"mrr 10, band {band}"] for band in range(script.BANDS)]
    assert found["lasso"]["mrr 10"] == pytest.approx(sum(bands) / len(bands))


def _scores(script: Any, **figures: tuple[list[float], list[float]]) -> Any:
    """Scores with reciprocal ranks and Jaccard indices of methods, alike in all pairs and directions."""
    rows = [
        {
            "pair": pair, "source": source, "target": target, "method": method,
            "scores": {"mrr 10": mrr, "jaccard 10": jaccard},
        }
        for pair in script.TWO
        for source, target in script.DIRECTIONS
        for method, (mrr, jaccard) in figures.items()
    ]  # fmt: skip
    return script.Scores({"rows": rows})


@pytest.mark.parametrize(
    ("relative", "shuffled", "verdict"),
    [
        (([0.93, 0.95], [0.33, 0.35]), ([0.002, 0.001], [0.0, 0.0]), "undecided"),  # two draws: wide intervals
        (([0.93, 0.931], [0.33, 0.331]), ([0.002, 0.001], [0.0, 0.0]), "confirmed"),
        (([0.93, 0.931], [0.28, 0.281]), ([0.002, 0.001], [0.0, 0.0]), "in part"),
        (([0.30, 0.301], [0.10, 0.101]), ([0.002, 0.001], [0.0, 0.0]), "in part"),
        (([0.30, 0.301], [0.10, 0.101]), ([0.40, 0.401], [0.0, 0.0]), "refuted"),
        (([0.30, 0.301], [0.10, 0.101]), ([0.30, 0.302], [0.0, 0.0]), "undecided"),
    ],
)
def test_the_verdict_follows_the_rule(script: Any, relative: Any, shuffled: Any, verdict: str) -> None:
    absolute = ([0.001, 0.0012], [0.0, 0.0])
    methods = {script.RELATIVE: relative, script.ABSOLUTE: absolute, script.SHUFFLED: shuffled}
    assert study.decided(script.agree(_scores(script, **methods))) == verdict
    assert study.decided(script.apart(_scores(script, **methods))) == "confirmed"


def test_a_map_is_better_if_it_is_in_every_draw(script: Any) -> None:
    zeros = [0.0, 0.0, 0.0]
    relative, better, unsure = [0.30, 0.40, 0.50], [0.35, 0.46, 0.55], [0.25, 0.60, 0.55]
    found = _scores(
        script, **{script.RELATIVE: (relative, zeros)}, lstsq=(better, zeros), ridge=(unsure, zeros),
        random=(zeros, zeros),
    )  # fmt: skip
    assert found.better(script.TWO) == ["lstsq"]


def test_intervals_are_those_of_student() -> None:
    student = importlib.import_module("relative_representations.kept").student
    found = student([1.0, 2.0, 3.0])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841), abs=1e-3)


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="there is no ../shared/data")
def test_the_experiment_writes_page_record_and_figure(script: Any, tmp_path: Path) -> None:
    draws = random.Random(0)
    words = [a + b + c for a in ("bla", "cor", "dim", "fen") for b in ("ta", "re", "so", "ni") for c in ("rin", "sel")]
    words += [f"{word}er" for word in words]
    texts = tmp_path / "texts"
    texts.mkdir()
    lines = [" ".join(draws.choices(words[draws.randrange(8) :: 8], k=8)) for _ in range(500)]
    (texts / "lines.txt").write_text("\n".join(lines))
    run_script(
        "relative_representations.word_vectors",
        "--preset",
        "test",
        "--texts",
        texts,
        "--data-dir",
        SHARED / "data",
        "--cache",
        tmp_path / "cache",
        "--out",
        tmp_path / "out",
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"word_vectors.{end}" for end in ("json", "md", "png")
    ]
    record = json.loads((tmp_path / "out" / "word_vectors.json").read_text())
    assert record["preset"] == "test"
    assert script.page(record) == (tmp_path / "out" / "word_vectors.md").read_text()
    assert all(map(has_keys, script.claims(record)))
