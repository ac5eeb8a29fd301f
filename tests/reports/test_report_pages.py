"""Pages of results: what they contain, what stays text, and that the results come back."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_stitch
from hf_stitch.analysis import Evaluation, Plan, Score, SimilarityAtlas, StitchGrid
from hf_stitch.reports.writing import DATA, page

EVIL = "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'>&\u2028"


def atlas_of(layers: int = 3, name: str = "layer", metric: str = "linear_cka", **options: Any) -> SimilarityAtlas:
    names = tuple(f"{name}{i}" for i in range(layers))
    values = {metric: np.linspace(0, 1, layers**2).reshape(layers, layers)}
    known: Any = {"ranges": {metric: (0.0, 1.0)}, **options}
    return SimilarityAtlas(values, names, names, 50, "mean", {metric: "moments"}, **known)


def grid_of() -> StitchGrid:
    cells = np.stack([np.full((2, 2), 0.9), np.full((2, 2), 0.8), np.ones((2, 2))], -1)
    scores = {"lstsq": {"agreement": cells, "auroc(knn)": cells + 0.05}}
    return StitchGrid(scores, {}, {}, ("a0", "a1"), ("b0", "b1"), "image-classification", "none", 9)


def evaluation() -> Evaluation:
    rows = {"stitched": {"accuracy": Score(0.8, 0.7, 0.9)}, "chance": {"accuracy": Score(0.1, 0.05, 0.15)}}
    return Evaluation("image-classification", 100, "sha256:0", rows, left_out={"source": "it has no head"})


RESULTS = {
    "atlas": atlas_of(),
    "grid": grid_of(),
    "evaluation": evaluation(),
    "plan": Plan("stitch", {"fitting": 1.0}, {"moments": 10}, {}, 10**9, 10**9),
}


class Structure(HTMLParser):
    """Counts the elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "onerror", "onclick")]


@pytest.mark.parametrize("name", RESULTS)
def test_results_have_a_page_and_come_back(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]
    result.to_html(tmp_path / "page.html")
    (again,) = hf_stitch.load_report(tmp_path / "page.html")
    assert type(again) is type(result) and again.to_dict() == result.to_dict()
    text = (tmp_path / "page.html").read_text()
    structure = Structure(text)
    assert structure.tags.count("script") == 4 and structure.tags.count("figure") >= 1
    assert not structure.links and "http-equiv" in text and "default-src 'none'" in text
    assert len(text) < 2_000_000


def test_findings_are_sentences() -> None:
    text = page([atlas_of(), grid_of(), evaluation()])
    assert "The most similar layers by linear_cka are layer2 of a and layer2 of b (1.000)" in text
    assert "no permutation test was run" in text
    assert "4 of 4 stitches reach 0.8" in text and "4 accurate stitches are strange to a detector" in text
    assert "Accuracy 0.800 [0.700, 0.900] for the stitched model, 0.100 for chance." in text
    assert "No source: it has no head." in text


def data_of(text: str) -> dict[str, object]:
    found = re.search(f'<script type="application/json" id="{DATA}">(.*?)</script>', text)
    assert found is not None
    loaded: dict[str, object] = json.loads(found[1])
    return loaded


@settings(max_examples=25, deadline=None)
@given(name=st.text(min_size=1, max_size=20))
def test_names_stay_text(name: str) -> None:
    plain = Structure(page([atlas_of(recipe={"data": "x"})]))
    for text in (name, EVIL + name):
        hostile = atlas_of(name=text, metric=f"m{text}", recipe={"data": text})
        made = page([hostile], title=text)
        structure = Structure(made)
        assert structure.tags.count("script") == 4 and "img" not in structure.tags and not structure.links
        assert set(structure.tags) <= set(plain.tags)
        kept = data_of(made)["results"]
        assert isinstance(kept, list) and kept[0]["layers_a"] == list(hostile.layers_a)


def test_many_layers_are_thinned_and_empty_cells_stay_empty() -> None:
    large = atlas_of(400)
    large.values["linear_cka"][0, 0] = np.nan
    text = page([large])
    assert "Figures show 200 layers of a side at most" in text
    assert len(text) < 6_000_000
    figures = json.loads(re.search('id="figures">(.*?)</script>', text)[1])  # type: ignore[index]
    (heat, *_) = figures[0][0]["views"]["colours over the values"]
    assert len(heat["z"]) == 200 and heat["z"][0][0] is None


def test_wrong_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a report shows results, got str"):
        hf_stitch.report(["x"], tmp_path / "page.html")  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least one result"):
        hf_stitch.report([], tmp_path / "page.html")
    (tmp_path / "other.html").write_text("<html></html>")
    with pytest.raises(ValueError, match="is not a report of hf-stitch"):
        hf_stitch.load_report(tmp_path / "other.html")
    atlas_of().to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    (tmp_path / "later.html").write_text(text.replace('"format_version":1', '"format_version":9'))
    with pytest.raises(ValueError, match="has format 9, but this version of hf-stitch reads up to 1: update"):
        hf_stitch.load_report(tmp_path / "later.html")
    (tmp_path / "foreign.html").write_text(text.replace('"result":"SimilarityAtlas"', '"result":"Popen"'))
    with pytest.raises(ValueError, match=r"a Popen of hf_stitch\.analysis\.comparison\.atlas, which is not known"):
        hf_stitch.load_report(tmp_path / "foreign.html")


def test_results_of_other_samples_are_told() -> None:
    def recorded(data: str) -> SimilarityAtlas:
        return atlas_of(recipe={"data": data})

    assert "different samples" not in page([recorded("x"), recorded("x")])
    assert "different samples" in page([recorded("x"), recorded("y")])
