from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from PIL import Image

from hf_stitch.analysis import SimilarityAtlas
from hf_stitch.plots import curves, heatmap, intervals


def labels(n: int) -> list[str]:
    return [f"label {i}" for i in range(n)]


@settings(max_examples=15, deadline=None)
@given(arrays(float, array_shapes(min_dims=2, max_dims=2, max_side=4), elements=st.floats(-1e3, 1e3, width=32)))
def test_every_cell_shows_its_number(values: np.ndarray) -> None:
    axes = heatmap(values, labels(len(values)), labels(values.shape[1])).axes[0]
    written = {(round(t.get_position()[1]), round(t.get_position()[0])): t.get_text() for t in axes.texts}
    assert written == {place: f"{value:.2f}" for place, value in np.ndenumerate(values)}


def test_heatmap_writes_readable_numbers() -> None:
    values = np.linspace(0, 1, 20).reshape(4, 5)
    axes = heatmap(values, labels(4), labels(5)).axes[0]
    image = axes.images[0]
    for text, value in zip(axes.texts, values.flat, strict=True):
        colours = image.to_rgba(value)[:3], to_rgb(text.get_color())
        ground, ink = (np.dot(rgb, [0.299, 0.587, 0.114]) for rgb in colours)
        assert abs(ground - ink) >= 0.45, (value, text.get_color())


def test_heatmap_shows_undefined_values_in_grey() -> None:
    axes = heatmap([[np.nan, 0.5]], ["row"], ["a", "b"]).axes[0]
    assert [t.get_text() for t in axes.texts] == ["–", "0.50"]
    red, green, blue, _ = axes.images[0].to_rgba(np.ma.masked_invalid([[np.nan, 0.5]]))[0, 0]
    assert red == green == blue
    assert axes.texts[0].get_color() == "black"


def test_heatmap_frames_marked_cells_and_keeps_the_range() -> None:
    values = [[0.2, 0.9], [0.4, 0.3]]
    figure = heatmap(values, ["a", "b"], ["c", "d"], title="T", label="L", low=0, high=1, marked=[[0, 1], [1, 0]])
    axes, bar = figure.axes
    frames = [p for p in axes.patches if isinstance(p, Rectangle)]
    assert [(round(f.get_center()[1]), round(f.get_center()[0])) for f in frames] == [(0, 1), (1, 0)]
    assert axes.images[0].get_clim() == (0, 1)
    assert (figure.get_suptitle(), bar.get_ylabel()) == ("T", "L")
    assert [t.get_text() for t in axes.get_yticklabels()] == ["a", "b"]


def test_heatmap_of_many_columns_has_no_numbers() -> None:
    assert not heatmap(np.eye(30), labels(30), labels(30)).axes[0].texts


def test_intervals_have_the_right_coordinates() -> None:
    axes = intervals({"a": (0.5, 0.4, 0.7), "b": (0.1, 0.1, 0.1), "c": (np.nan,) * 3}, "accuracy").axes[0]
    first, second, third = axes.collections[0].get_segments()
    np.testing.assert_array_equal([first, second], [[[0.4, 0], [0.7, 0]], [[0.1, 1], [0.1, 1]]])
    assert not len(third)
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), [0.5, 0.1, np.nan])
    assert [t.get_text() for t in axes.texts] == ["0.500", "0.100"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["a", "b", "c"]
    assert axes.get_xlabel() == "accuracy"
    low, high = axes.get_ylim()
    assert low > high, "the first name must be on top"


def test_figures_are_saved(tmp_path) -> None:
    for figure in (heatmap([[1.0, 2.0]], ["row"], ["a rather long label", "b"]), intervals({"a": (1, 0, 2)}, "x")):
        figure.savefig(tmp_path / "figure.png", dpi=50)
        pixels = np.asarray(Image.open(tmp_path / "figure.png").convert("L"))
        assert pixels.min() < 100 < 250 < pixels.max()


def test_importing_plots_imports_no_matplotlib_and_drawing_no_pyplot() -> None:
    code = (
        "import sys; from hf_stitch.plots import heatmap, intervals; "
        "assert 'matplotlib' not in sys.modules; "
        "heatmap([[1.0]], ['a'], ['b']); intervals({'a': (1, 0, 2)}, 'x'); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_curves_have_the_right_coordinates_in_order() -> None:
    figure = curves({"a": {8: (0.9, 0.8, 1.0), 4: (0.5, 0.4, 0.6)}, "b": {4: (0.1, 0.1, 0.1)}}, axis="rank", label="x")
    axes = figure.axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[4, 0.5], [8, 0.9]])
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["a", "b"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("rank", "x")
    assert curves({str(i): {0: (1, 1, 1)} for i in range(9)}, axis="λ", label="x").axes[0].get_legend() is None


def test_curves_can_be_told_apart_without_colours() -> None:
    series = {f"{kind}/{layer}": {0: (1, 1, 1), 1: (2, 2, 2)} for kind in "abcd" for layer in range(8)}
    axes = curves(series, axis="step", label="x", split={name: (name[2:], name[0]) for name in series}).axes[0]
    styles = {(line.get_marker(), line.get_linestyle()) for line in axes.lines}
    assert len(styles) == 32 and len({line.get_color() for line in axes.lines}) == 8
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [*map(str, range(8)), *"abcd"]


def test_frames_and_numbers_of_heatmaps_are_visible_in_black_and_white() -> None:
    """A black frame with a white edge stands out from every grey."""
    values = np.linspace(0, 1, 12).reshape(1, 12)
    figure = heatmap(values, ["row"], labels(12), marked=np.ones((1, 12)), marks="best", low=0, high=1)
    greys = [np.dot(figure.axes[0].images[0].to_rgba(v)[:3], [0.299, 0.587, 0.114]) for v in values[0]]
    assert (np.diff(greys) > 0).all()
    (frame, *_) = figure.axes[0].patches
    assert to_rgb(frame.get_edgecolor()) == (0, 0, 0)
    assert to_rgb(frame.get_path_effects()[0]._gc["foreground"]) == (1, 1, 1)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["best"]


NAMESAKES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str]]] = {
    "sizes": (
        {"summary": "EfficientNet, 82 layers with weights, 5,288,548 parameters", "weights_hash": "sha256:ab"},
        {"summary": "EfficientNet, 116 layers with weights, 7,794,184 parameters", "weights_hash": "sha256:cd"},
        ("EfficientNet (5,288,548 parameters)", "EfficientNet (7,794,184 parameters)"),
    ),
    "weights": (
        {"summary": "Net, 2 layers with weights, 9 parameters", "weights_hash": f"sha256:{'ab' * 32}"},
        {"summary": "Net, 2 layers with weights, 9 parameters", "weights_hash": f"sha256:{'cd' * 32}"},
        (f"Net ({'ab' * 12})", f"Net ({'cd' * 12})"),
    ),
    "revisions": (
        {"id": "org/vit", "revision": "0" * 40}, {"id": "org/vit"},
        (f"org/vit ({'0' * 24})", "org/vit (no revision)"),
    ),
    "one network": ({"id": "org/vit"}, {"id": "org/vit"}, ("org/vit", "org/vit")),
    "other names": ({"id": "org/vit", "revision": "1"}, {"id": "org/bert"}, ("org/vit", "org/bert")),
}  # fmt: skip


@pytest.mark.parametrize(("a", "b", "expected"), NAMESAKES.values(), ids=NAMESAKES)
def test_networks_of_one_name_are_told_apart(a: dict[str, Any], b: dict[str, Any], expected: tuple[str, str]) -> None:
    recipe = {"a": {"reference": a, "class": "Net"}, "b": {"reference": b, "class": "Net"}}
    atlas = SimilarityAtlas({"cka": np.eye(2)}, ("0", "1"), ("0", "1"), 9, "mean", {"cka": "moments"}, (), recipe)
    axes = atlas.plot().axes[0]
    assert (axes.get_ylabel(), axes.get_xlabel()) == (f"layers of a: {expected[0]}", f"layers of b: {expected[1]}")
    assert atlas._titles == (axes.get_ylabel(), axes.get_xlabel())  # as on the page


def test_heatmaps_of_an_atlas_name_networks_and_have_the_scale_of_the_metric() -> None:
    values = {"linear_cka(debiased=True)": np.array([[0.2, -0.1]]), "procrustes": np.array([[0.4, 0.9]])}
    recipe = {"a": {"reference": {"id": "timm:resnet18"}}, "b": {"reference": {"id": None}, "class": "Net"}}
    atlas = SimilarityAtlas(
        values, ("a0",), ("b0", "b1"), 9, "mean", dict.fromkeys(values, "moments"), ("procrustes",), recipe,
        {"linear_cka(debiased=True)": (-1.0, 1.0), "procrustes": (0.0, 2**0.5)},
    )  # fmt: skip
    for metric, direction, scale in (("linear_cka", "higher", (-0.1, 0.2)), ("procrustes", "lower", (0.4, 0.9))):
        figure = atlas.plot(metric)
        axes, bar = figure.axes
        assert (axes.get_ylabel(), axes.get_xlabel()) == ("layers of a: timm:resnet18", "layers of b: Net")
        assert axes.images[0].get_clim() == scale
        assert bar.get_ylabel().endswith(f"{direction} = more alike")
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["best match of each layer of a"]
    assert atlas.plot("procrustes", scale="fixed").axes[0].images[0].get_clim() == (0, 2**0.5)
    with pytest.raises(ValueError, match="scale must be 'data' or 'fixed', got 'log'"):
        atlas.plot(scale="log")  # type: ignore[arg-type]


def test_a_map_without_any_value_is_drawn_with_empty_cells() -> None:
    figure = heatmap([[np.nan, np.nan]], ["a"], ["c", "d"])
    assert [text.get_text() for text in figure.axes[0].texts] == ["–", "–"]
    figure.savefig(io.BytesIO())


FIVE = {kind: {0: (1, 1, 1)} for kind in "abcde"}
REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: heatmap([[1.0, 2.0]], ["row"], ["column"]), r"FixedLocator locations \(2\)"),
    (lambda: heatmap([[1.0], [2.0]], ["row"], ["column"]), r"FixedLocator locations \(2\)"),
    (lambda: heatmap([[np.inf]], ["row"], ["column"]), "infinities"),
    (lambda: heatmap([[1.0]], ["row"], ["column"], marked=[True]), "marked must have the shape"),
    (lambda: intervals({}, "accuracy"), "scores must contain"),
    (lambda: intervals({"a": (0.5, 0.6, 0.4)}, "accuracy"), r"'a' must begin before it ends, got 0\.6 to 0\.4"),
    (lambda: curves({}, axis="rank", label="x"), "series must contain"),
    (lambda: curves({"a": {}}, axis="rank", label="x"), "series must contain"),
    (
        lambda: curves(FIVE, axis="x", label="", split={kind: ("one", kind) for kind in FIVE}),
        "at most 4 kinds of dashes can be distinguished, got a, b, c, d, e",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_cannot_be_drawn_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
