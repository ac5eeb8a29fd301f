"""Pages of results: what they contain, what stays text, and that the results come back."""

from __future__ import annotations

import html
import importlib
import io
import json
import pkgutil
import re
import sys
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hf_stitch_studies import Curves, Trajectory
from hypothesis import given, settings, strategies as st
from rich.console import Console
from rich.table import Table

import hf_stitch
from hf_stitch.analysis import Audit, Detection, Evaluation, PermutationTestResult, Plan, Score, SimilarityAtlas
from hf_stitch.analysis.comparison.atlas import LayerSize
from hf_stitch.analysis.comparison.networks import NetworkAtlas
from hf_stitch.analysis.detection.noise import DOSES
from hf_stitch.analysis.evaluation import Example, StitchedParts
from hf_stitch.analysis.grid import StitchGrid
from hf_stitch.analysis.permutation import MaximumTest
from hf_stitch.built_ins import BUILT_INS
from hf_stitch.reports.page import DATA, page, section as general_section
from hf_stitch.reports.training import dynamics_section, history_section
from hf_stitch.results import Result
from hf_stitch.training import Dynamics, History
from hf_stitch.training.history import Measurement

EVIL = "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'>&\u2028"


def atlas_of(layers: int = 3, name: str = "layer", metric: str = "linear_cka", **options: Any) -> SimilarityAtlas:
    names = tuple(f"{name}{i}" for i in range(layers))
    values = {metric: np.linspace(0, 1, layers**2).reshape(layers, layers)}
    known: Any = {"ranges": {metric: (0.0, 1.0)}, **options}
    return SimilarityAtlas(values, names, names, 50, "mean", {metric: "moments"}, **known)


def detection(dose: float = 0.4) -> Detection:
    def cells(value: float) -> np.ndarray:
        return np.stack([np.full((2, 2), value), np.full((2, 2), value - 0.1), np.full((2, 2), value + 0.1)], -1)

    figures = {"lstsq": {"auroc": cells(0.9), "dose": cells(dose), "one_sided": cells(0.9)}}
    controls = {"halves": np.full((2, 3), 0.5), "far": np.full((2, 3), 0.9)}
    return Detection("knn", ("b0", "b1"), False, figures, {"coloured": np.full((2, len(DOSES), 3), 0.8)}, controls)


def grid_of(name: str = "b", hashes: tuple[str, str] = ("x", "y")) -> StitchGrid:
    cells = np.stack([np.full((2, 2), 0.9), np.full((2, 2), 0.8), np.ones((2, 2))], -1)
    scores = {"lstsq": {"agreement": cells, "structural_error": cells / 2}}
    recipe = {side: {"weights_hash": digest} for side, digest in zip("ab", hashes, strict=True)}
    return StitchGrid(
        scores, {}, {}, ("a0", "a1"), (f"{name}0", f"{name}1"), "image-classification", "none", 9,
        {"knn": detection()}, recipe=recipe,
    )  # fmt: skip


def evaluation(examples: tuple[Example, ...] = ()) -> Evaluation:
    rows = {"stitched": {"accuracy": Score(0.8, 0.7, 0.9)}, "chance": {"accuracy": Score(0.1, 0.05, 0.15)}}
    left_out = {"source": "it has no head"}
    confusion = {"cat": {"cat": 60, "dog": 5}, "dog": {"dog": 34, "cat": 1}}
    parts = StitchedParts("a", "a0", 100, 250, "x", "b", "b0", 300, 400, "y", "linear, 8 → 8", 72, {"seed": 0})
    more: dict[str, Any] = {"left_out": left_out, "parts": parts, "confusion": confusion, "examples": examples}
    return Evaluation("image-classification", 100, "sha256:0", rows, **more)


def audit_of() -> Audit:
    rows = {"stitched": 0.9, "mean_only": 0.1, "target": 1.0, "chance": 0.1}
    scores = {who: {"relative_accuracy": Score(value, value - 0.02, value + 0.02)} for who, value in rows.items()}
    figures = {"stitched": {"auroc": np.full((1, 1, 3), 0.6), "dose": np.array([[[0.02, 0.0, 0.04]]])}}
    figures["stitched"]["one_sided"] = figures["stitched"]["auroc"]
    doses = {"coloured": np.full((1, len(DOSES), 3), 0.85)}
    found = Detection("knn", ("b0",), False, figures, doses, {"far": np.full((1, 3), 0.9)})
    scored = Evaluation("image-classification", 100, "sha256:0", scores)
    return Audit(scored, 0.8, 0.1, "none", {"body": 0.2}, {"body": {"knn": found}}, "sha256:1", 0)


def dynamics_of() -> Dynamics:
    ends = (0.3, 0.4, 0.5)
    values = {f"block{i}": np.array([[1, 0.5, last], [0.5, 1, 0.95], [last, 0.95, 1]]) for i, last in enumerate(ends)}
    return Dynamics(values, (0, 10, 20), (0.0, 1.0, 2.0), "linear_cka", True, 9, "mean", (0.0, 1.0))


HISTORY = History("stitchability", tuple(Measurement(s, None, {"stitchability/a": s / 10}) for s in range(3)))
RESULTS = {
    "atlas": atlas_of(),
    "grid": grid_of(),
    "evaluation": evaluation(),
    "audit": audit_of(),
    "detection": detection(),
    "dynamics": dynamics_of(),
    "curves": Curves("rank", 100, "sha256:0", {"low_rank": {1: Score(0.5, 0.4, 0.6), 2: Score(0.9, 0.8, 1.0)}}),
    "trajectory": Trajectory((0, 10), {"relative_accuracy": (0.2, 0.9)}, n=50),
    "history": HISTORY,
    "plan": Plan("stitch", {"fitting": 1.0}, {"moments": 10}, {}, 10**9, 10**9),
    "test": PermutationTestResult("LinearCKA()", 0.8, np.array([0.1, 0.3, 0.2]), True, 1.0, 50, 50, 0),
}


class Structure(HTMLParser):
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
    assert structure.tags.count("script") == 4 and ("figure" in structure.tags or "pre" in structure.tags)
    assert all(link.startswith("data:image/png;base64,") for link in structure.links)
    assert "http-equiv" in text and "default-src 'none'" in text
    assert len(text) < 2_000_000


def test_findings_are_sentences() -> None:
    text = page([atlas_of(), grid_of(), evaluation(), audit_of(), dynamics_of(), HISTORY])
    namesakes = "1 of 3 layers of a match their namesake in b by linear_cka; closest runner-up: layer1 for layer2"
    assert namesakes in text and "The most similar layers are layer2 of a and layer2 of b (1.000)" in text
    assert '<th scope="col">namesake</th>' in text and '<th scope="col">runner-up</th>' in text
    assert "without a permutation test" in text
    assert "4 of 4 stitches reach 0.8" in text and "4 accurate stitches are out of distribution" in text
    assert "Accuracy 0.800 [0.700, 0.900] for the stitched model, 0.100 for chance." in text
    assert "No source: it has no head." in text
    assert "472 parameters (21% source up to a0, 15% stitch, linear, 8 → 8, 64% target after b0)" in text
    assert "Both predict the same class for 94 of 100 samples; most often, cat becomes dog (5 samples)." in text
    assert "Accurate, and no detector finds it out of distribution." in text
    assert "All layers settle at once: their linear_cka with the end of training stays at 0.9 or better" in text
    assert "a 0.000 at step 0, 0.200 at step 2." in text


def test_networks_are_drawn_along_the_axes() -> None:
    sizes = {side: {f"layer{i}": LayerSize(8 * i, i / 10) for i in range(3)} for side in "ab"}
    (figure,) = figures_of(page([atlas_of(sizes=sizes)]))[0]["figures"]
    bars = [trace for trace in figure["views"][0]["traces"] if trace["type"] == "bar"]
    assert [bar["x"] for bar in bars] == [[0, 0.1, 0.2], ["layer0", "layer1", "layer2"]]
    assert bars[0]["hovertext"][2] == "layer2: 16 features, 20.0% of the parameters"
    assert figure["layout"]["xaxis"]["domain"] == [0, 0.88]


def test_tested_cells_have_chance_and_p_values() -> None:
    ones = np.ones((3, 3))
    test = MaximumTest(ones / 5, ones * 3, ones / 4, np.zeros(9), np.zeros((9, 3)), np.zeros((9, 3)), 0)
    text = page([atlas_of(tests={"linear_cka": test})])
    heat = figures_of(text)[0]["figures"][0]["views"][0]["traces"][0]
    assert heat["customdata"][0][0] == [0.2, 0.1] and "by chance %{customdata[0]:.4g}" in heat["hovertemplate"]
    assert "3 of 3 best matches are beyond chance" not in text  # .1 is above the level
    assert "0 of 3 best matches are beyond chance" in text


def test_sections_of_the_same_networks_share_a_key_and_other_samples_are_told() -> None:
    recipe = {side: {"reference": {"weights_hash": digest}} for side, digest in zip("ab", "xy", strict=True)}
    keys = [s["networks"] for s in figures_of(page([atlas_of(recipe=recipe), grid_of(), evaluation(), atlas_of()]))]
    assert keys == ["x y", "x y", "x y", "3"]
    one, other = (atlas_of(recipe={"a": {"data": data}}) for data in "xy")
    assert "different samples" not in page([one, one])
    assert "different samples" in page([one, other])


def test_accuracy_and_detectors_are_side_by_side_and_strange_stitches_are_outlined() -> None:
    first, rest = figures_of(page([grid_of()]))[0]["figures"]
    heats = [trace for trace in first["views"][0]["traces"] if trace["type"] == "heatmap"]
    assert [heat["name"] for heat in heats] == ["agreement", "auroc(knn)"] and heats[1]["xaxis"] == "x2"
    marked = [trace for trace in first["views"][0]["traces"] if trace["type"] == "scatter"]
    assert [len(trace["x"]) for trace in marked] == [4, 4] and marked[1]["yaxis"] == "y2"
    assert heats[0]["customdata"][0][0] == [0.8, 1.0]  # the interval
    assert [view["label"] for view in rest["views"]] == ["structural_error", "dose(knn)"]


def test_samples_are_shown_if_asked_and_never_in_the_data(tmp_path: Path) -> None:
    from PIL import Image

    kinds = [Image.new("RGB", (400, 100), "red"), "a <b>text</b> & more", torch.rand(3, 8, 8), torch.randn(5)]
    result = evaluation(tuple(Example(str(i), 0.9, "cat", "dog", "dog", sample) for i, sample in enumerate(kinds)))
    result.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count('<img src="data:image/png;base64,') == 2
    assert "a &lt;b&gt;text&lt;/b&gt; &amp; more" in text and "Tensor of shape (5,)" in text
    assert "1: target dog, stitched cat, truth dog (distance 0.900)" in text
    assert "text" not in json.dumps(data_of(text)["results"])
    (again,) = hf_stitch.load_report(tmp_path / "page.html")
    assert isinstance(again, Evaluation) and [each.id for each in again.examples] == ["0", "1", "2", "3"]
    assert again.examples[1].sample is None
    assert "<img" not in page([evaluation()])


def figures_of(text: str) -> Any:
    found = re.search('id="figures">(.*?)</script>', text)
    assert found is not None
    return json.loads(found[1])


def data_of(text: str) -> dict[str, Any]:
    found = re.search(f'<script type="application/json" id="{DATA}">(.*?)</script>', text)
    assert found is not None
    loaded: dict[str, Any] = json.loads(found[1])
    return loaded


@settings(max_examples=10, deadline=None)
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
    assert "Figures show at most 200 evenly spaced layers" in text
    assert len(text) < 6_000_000
    (heat, *_) = figures_of(text)[0]["figures"][0]["views"][0]["traces"]
    assert len(heat["z"]) == 200 and heat["z"][0][0] is None


def test_figures_and_controls_that_only_some_rows_have_are_a_dash() -> None:
    whole = evaluation()
    assert "│ chance    │ –" in str(replace(whole, scores={**whole.scores, "chance": {}}))
    audit = audit_of()
    other = replace(audit.detections["body"]["knn"], controls={"halves": np.full((1, 3), 0.5)})
    console = Console(width=200, file=io.StringIO())
    console.print(replace(audit, detections={"body": {**audit.detections["body"], "other": other}}))
    assert "–" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_page_imports_no_module_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr("hf_stitch.cli.main", lambda: ran.append("main"))
    for module in ("hf_stitch.__main__", "hf_stitch.reports.page", "os", "hf_stitch"):
        monkeypatch.delitem(sys.modules, "hf_stitch.__main__", raising=False)
        record = data_of(page([atlas_of()]))
        record["results"][0].update(module=module, result="Evil")
        place = tmp_path / "page.html"
        place.write_text(f'<script id="{DATA}">{json.dumps(record)}</script>')
        with pytest.raises(ValueError, match=r"page\.html .*an? Evil of .*, which is unknown"):
            hf_stitch.load_report(place)
        place.write_text(place.read_text().replace('"Evil"', '"Curves"'))  # a registered name
        with pytest.raises(ValueError, match=r"Curves (is damaged: .* with axis|of os, which is unknown)"):
            hf_stitch.load_report(place)
        assert "hf_stitch.__main__" not in sys.modules and not ran
    importlib.import_module("hf_stitch.__main__")
    assert not ran


def test_every_result_of_the_package_is_known_to_pages() -> None:
    for found in pkgutil.walk_packages(hf_stitch.__path__, "hf_stitch."):
        importlib.import_module(found.name)
    own = [kind for kind in below(Result) if kind.__module__.startswith("hf_stitch.")]
    assert {kind.__name__: f"{kind.__module__}:{kind.__name__}" for kind in own} == BUILT_INS["results"]


def below(kind: type) -> set[type]:
    return {each for child in kind.__subclasses__() for each in {child, *below(child)}}


def paths(value: Any, within: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of all values in nested JSON values, of lists those in the first element."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    return [within, *(found for key, item in inner for found in paths(item, (*within, key)))]


WRONG: dict[str, Any] = {
    "nothing": None, "text": "x", "number": 7, "negative": -1, "huge": 10**400, "list": [[]], "object": {"x": {}},
    "pairs": [["a", "b", "c"]], "flag": True,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(RESULTS.keys() - {"detection"}))  # which is a part of others
def test_every_wrong_value_in_a_page_is_a_value_error_that_names_the_page(name: str, tmp_path: Path) -> None:
    record = data_of(page([RESULTS[name]]))
    place = tmp_path / "page.html"
    for where in [("format_version",), *(("results", *rest) for rest in paths(record["results"]))]:
        for value in WRONG.values():
            changed = json.loads(json.dumps(record))
            inner = changed
            for key in where[:-1]:
                inner = inner[key]
            inner[where[-1]] = value
            place.write_text(f'<script id="{DATA}">{json.dumps(changed)}</script>')
            try:
                hf_stitch.load_report(place)
            except ValueError as error:
                assert str(error).startswith(str(place)), error


WRONG_DATA = [
    "[" * 100_000, '{"format_version": 1, "results": ' + "[" * 5000 + "]" * 5000 + "}", "{}", "null", "[]", '"x"',
    '{"format_version": 1}', '{"format_version": "1", "results": []}', '{"format_version": 1, "results": {}}',
    '{"format_version": 1, "results": [1]}', '{"format_version": 1, "results": [{}]}', "",
]  # fmt: skip
PAGE = page([atlas_of()])
WRONG_PAGES: list[tuple[bytes, str]] = [
    *((content, "") for content in (b"<![x[ y", b"\xff\xfe", b"<!x[<![", b"")),
    *((f'<script id="{DATA}">{text}</script>'.encode(), "") for text in WRONG_DATA),
    (b"<html></html>", "is not a report of hf-stitch"),
    (PAGE.replace('"format_version":1', '"format_version":9').encode(), "has format 9, .* reads up to 1; update"),
    (PAGE.replace(':"SimilarityAtlas"', ':"Popen"').encode(), r"a Popen of hf_stitch\..*, which is unknown"),
    (PAGE.replace('"layers_a":["layer0",', '"layers_a":[1,').encode(), r"damaged: layers_a\.0 must be a text, got 1"),
]


@pytest.mark.parametrize(("content", "message"), WRONG_PAGES, ids=range(len(WRONG_PAGES)))
def test_a_file_that_is_no_page_of_results_is_refused_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    place = tmp_path / "page.html"
    place.write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s){re.escape(str(place))}.*{message}"):
        hf_stitch.load_report(place)


@pytest.mark.parametrize(("results", "error"), [(["x"], "got str"), ([], "at least one result")])
def test_what_is_no_result_has_no_page(results: Any, error: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        hf_stitch.report(results, tmp_path / "page.html")


def test_the_page_of_several_networks_has_its_own_headline_and_no_layer_matches_itself() -> None:
    metric, names = "linear_cka(debiased=True)", ("a/0", "a/1", "b/0", "b/1")
    values = np.array([[1.0, 0.4, 0.8, 0.3], [0.4, 1.0, 0.2, 0.9], [0.8, 0.2, 1.0, 0.5], [0.3, 0.9, 0.5, 1.0]])
    flat = SimilarityAtlas({metric: values}, names, names, 100, "mean", {metric: "moments"})
    atlas = NetworkAtlas(flat, {"a": ("0", "1"), "b": ("0", "1")})
    text = page([atlas])
    assert "<h1>Similarity of networks</h1>" in text and "NetworkAtlas" not in text.partition("<footer>")[0]
    assert (
        "The most similar networks by linear_cka(debiased=True) are a and b (0.850); 4 of 4 layers match the "
        "corresponding layer of another network, and 2 of 4 are expected by chance." in text
    )
    networks, layers = figures_of(text)[0]["figures"]
    assert networks["views"][0]["traces"][0]["z"] == [[1.0, 0.85], [0.85, 1.0]]
    _, best = layers["views"][0]["traces"]
    assert (best["y"], best["x"]) == (["a/0", "a/1", "b/0", "b/1"], ["b/0", "b/1", "a/0", "a/1"])
    assert best["name"] == "best match in another network"
    patches = atlas.plot().axes[0].patches  # frames
    places = sorted((round(patch.get_y() + 0.5), round(patch.get_x() + 0.5)) for patch in patches)
    assert places == [(0, 2), (1, 3), (2, 0), (3, 1)]


def test_a_headline_from_a_table_is_its_whole_title() -> None:
    title = "linear_cka(debiased=True) of the most similar layers, over all pairs of networks"

    @dataclass(frozen=True)
    class Narrow(Result):
        def __rich__(self) -> Table:
            return Table("a", title=title)

        def to_pandas(self) -> pandas.DataFrame:
            return pandas.DataFrame()

    assert general_section(Narrow()).verdict == title


def heats_of(result: Result) -> list[dict[str, Any]]:
    views = [view for figure in figures_of(page([result]))[0]["figures"] for view in figure["views"]]
    return [trace for view in views for trace in view["traces"] if trace["type"] == "heatmap"]


def test_a_negative_score_is_not_drawn_as_zero_and_axes_have_the_names_of_the_networks() -> None:
    values = np.array([[0.9, -2.5], [0.6, 0.2]])
    scores = {"lstsq": {"relative_r2": np.stack([values] * 3, -1), "agreement": np.stack([values / 10] * 3, -1)}}
    recipe = {side: {"id": None, "summary": f"{side.upper()}Net, 4 layers"} for side in "ab"}
    grid = StitchGrid(scores, {}, {}, ("a0", "a1"), ("b0", "b1"), "regression", "none", 9, recipe=recipe)
    first, second = heats_of(grid)
    assert (first["zmin"], first["zmax"]) == (-2.5, 0.9) and "meta" not in first  # R² has no fixed range
    assert (second["zmin"], second["zmax"], second["meta"]) == (-0.3, 0.1, [-0.3, 1.0])
    axes = grid.plot().axes[0]
    assert axes.images[0].get_clim() == (-2.5, 0.9)
    assert grid.plot("agreement").axes[0].images[0].get_clim() == (-0.3, 0.1)
    layout = figures_of(page([grid]))[0]["figures"][0]["layout"]
    named = ("layers of the source: ANet", "layers of the target: BNet")
    assert (layout["yaxis"]["title"]["text"], layout["xaxis"]["title"]["text"]) == named
    assert (axes.get_ylabel(), axes.get_xlabel()) == named


def test_colours_lie_where_values_lie_and_do_not_show_rounding() -> None:
    (heat,) = heats_of(replace(atlas_of(), values={"linear_cka": np.linspace(0.83, 0.96, 9).reshape(3, 3)}))
    assert (heat["zmin"], heat["zmax"], heat["meta"]) == (0.8, 1.0, [0.0, 1.0])
    (equal,) = heats_of(replace(atlas_of(), values={"linear_cka": 1 - np.eye(3) * 1e-15}))
    assert (equal["zmin"], equal["zmax"]) == (0.9, 1.0)
    assert [(heat["zmin"], heat["zmax"]) for heat in heats_of(grid_of())[:2]] == [(0.8, 0.9), (0.8, 0.9)]


@pytest.mark.parametrize("many", [True, False])
def test_stars_are_on_the_fewer_pairs(many: bool) -> None:
    meaning = "p > 0.05: not beyond chance; the rest are" if many else "p ≤ 0.05, adjusted for the search"
    ones, null = np.ones((3, 3)), np.zeros((99, 3))
    scores = ones if many else -ones  # above, or below all maxima of permutations

    def tested(scores: np.ndarray) -> SimilarityAtlas:
        return atlas_of(tests={"linear_cka": MaximumTest(ones / 5, scores, ones, null[:, 0], null, null, 0)})

    (view,) = figures_of(page([tested(scores)]))[0]["figures"][0]["views"]
    which = "All pairs are" if many else "No pair is"
    assert view["caption"].endswith(f" {which} beyond chance (p ≤ 0.05, adjusted for the search).")
    one = tested(np.where(np.arange(9).reshape(3, 3) == 1, -scores, scores))
    (view,) = figures_of(page([one]))[0]["figures"][0]["views"]
    (stars,) = [trace for trace in view["traces"] if trace.get("marker", {}).get("symbol") == "star"]
    assert (html.unescape(stars["name"]), stars["y"], stars["x"]) == (meaning, ["layer0"], ["layer1"])
    figure = one.plot()
    assert [text.get_text().endswith("*") for text in figure.axes[0].texts] == [False, True] + [False] * 7
    assert figure.legends[0].get_texts()[1].get_text() == meaning


def test_the_page_of_a_training_begins_with_what_changed_most() -> None:
    moves = {"cka/a": 0.01, "cka/b": 0.02, "cka/c": 0.03, "cka/d": -0.4, "cka/e": float("nan")}
    measured = tuple(Measurement(s, None, {f"x/{name}": 1 + s * by for name, by in moves.items()}) for s in range(2))
    found = history_section(History("x", measured))
    assert found.verdict.startswith("cka/d changed most: 1.000 at step 0, 0.600 at step 1; then cka/c 1.000")
    assert found.verdict.endswith("; 2 more curves changed less.")
    dynamics = dynamics_of()
    dynamics = replace(dynamics, values=dict(reversed(dynamics.values.items())))
    assert dynamics_section(dynamics).figures[1].first == 2 and 'value="2"> <output>' in page([dynamics])
