"""Atlases compared with the metric functions on captured rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import hf_stitch
from hf_stitch import Adapter, NotACutError, compare
from hf_stitch.analysis import ComparisonPlan, SimilarityAtlas
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.comparison import comparing as comparing_module
from hf_stitch.analysis.comparison.asking import ROWS_OF
from hf_stitch.analysis.extraction import extract_activations
from hf_stitch.registry import registries

from tiny_networks import WORDS, tokenizer  # isort: skip

N, SIZE = 61, 32
DEBIASED = registries.metrics.build("linear_cka", debiased=True)
MINIBATCH = registries.metrics.build("minibatch_cka", batch_size=16)


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().eval().double()


@pytest.fixture(scope="module")
def cnn() -> Adapter:
    model = seeded(lambda: timm.create_model("resnet10t", num_classes=5, channels=(8, 12, 16, 16)), 0)
    return hf_stitch.load(model, example_inputs=torch.zeros(2, 3, SIZE, SIZE, dtype=torch.float64))


BODY = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture(scope="module")
def vit() -> Adapter:
    config = transformers.ViTConfig(**BODY, num_hidden_layers=3, image_size=SIZE, patch_size=8, initializer_range=0.3)
    return hf_stitch.load(seeded(lambda: transformers.ViTForImageClassification(config), 1))


def bert(seed: int, order: int = 0) -> Adapter:
    """A tiny text model whose vocabulary is shuffled by ``order``."""
    config = transformers.BertConfig(**BODY, num_hidden_layers=2, vocab_size=40)
    words = tokenizer(30, order, "[PAD]", "[CLS]", "[SEP]", "[UNK]", pad_token="[PAD]", unk_token="[UNK]")
    return hf_stitch.load(seeded(lambda: transformers.BertModel(config), seed), processor=words)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS[:30], k=draw.randint(2, 9))) for _ in range(N)]


def mlp(seed: int, *middle: nn.Module) -> Adapter:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), *middle, nn.ReLU(inplace=True), nn.Linear(6, 3)), seed)
    return hf_stitch.load(model, example_inputs=torch.zeros(2, 4, dtype=torch.float64))


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(N, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.fixture(scope="module")
def points() -> Tensor:
    return torch.randn(N, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def captured(adapter: Adapter, samples: Any, pooling: Any, grid: Any = None) -> dict[str, Tensor]:
    """Return the rows of every cut, with all samples in one batch."""
    with torch.no_grad():
        found = adapter.encode(adapter.preprocess(list(samples)), adapter.layers)
    return {name: (r.resize(grid) if grid else r).rows(pooling) for name, r in found.items()}


def expected(metric: Any, x: dict[str, Tensor], y: dict[str, Tensor]) -> np.ndarray:
    return np.array([[type(metric).function(a, b, **metric.options).item() for b in y.values()] for a in x.values()])


METRICS = [
    "linear_cka", DEBIASED, MINIBATCH, "procrustes", registries.metrics.build("cca", ridge=0.1), "linear_regression",
    "mutual_knn", "rsa", "rbf_cka",
]  # fmt: skip


@pytest.mark.parametrize(("pooling", "batch_size"), [("mean", 16), ("flatten", 7)])
def test_values_match_the_metrics(cnn: Adapter, vit: Adapter, images: Tensor, pooling: Any, batch_size: int) -> None:
    metrics = [m for m in METRICS if pooling == "mean" or m != "linear_regression"]
    atlas = compare(cnn, vit, images, metrics=metrics, rows=ROWS_OF[pooling], batch_size=batch_size, progress=False)
    x, y = captured(cnn, images, pooling), captured(vit, images, pooling)
    assert atlas.layers_a == cnn.layers and atlas.layers_b == vit.layers and atlas.n == N
    for metric, (label, values) in zip(map(registries.metrics.build, metrics), atlas.values.items(), strict=True):
        wanted, told = expected(metric, x, y), np.isnan(values)  # undefined where independent rows score as much
        assert told.sum() == len([pair for pair in atlas.undefined if pair.startswith(f"{label}: ")])
        np.testing.assert_allclose(values[~told], wanted[~told], rtol=1e-9, atol=1e-9, err_msg=metric.name)


def test_positions_are_resized_to_the_grid_of_b(cnn: Adapter, vit: Adapter, images: Tensor) -> None:
    metrics = ["linear_cka", "procrustes"]
    atlas = compare(vit, cnn, images, metrics=metrics, rows="resized", batch_size=16, progress=False)
    grids = {name: cnn.spec(name).grid for name in cnn.layers}
    assert len(set(grids.values())) > 2
    for place, (layer, grid) in enumerate(grids.items()):
        x = captured(vit, images, "none", grid)
        y = {layer: captured(cnn, images, "none")[layer]}
        for name in metrics:
            got = atlas[name][:, [place]]
            np.testing.assert_allclose(got, expected(registries.metrics.build(name), x, y), rtol=1e-9, atol=1e-9)
    with pytest.warns(UserWarning, match="assumes independent rows"):
        compare(vit, vit, images, metrics=[DEBIASED], rows="resized", progress=False)


def test_texts_are_compared_by_token_and_by_mean(texts: list[str]) -> None:
    a, b, other = bert(0), bert(1), bert(2, order=1)
    for rows, pooling in (("positions", "none"), ("resized", "none"), ("tokens", "none"), ("mean", "mean")):
        atlas = compare(a, b, texts, rows=rows, batch_size=8, progress=False)  # type: ignore[call-overload]
        x, y = captured(a, texts, pooling), captured(b, texts, pooling)
        np.testing.assert_allclose(atlas["linear_cka"], expected(registries.metrics.build("linear_cka"), x, y), 1e-9)
    assert compare(a, other, texts, progress=False)["linear_cka"].shape == (2, 2)
    with pytest.raises(ValueError, match="tokenizers differ"):
        compare(a, other, texts, rows="resized", progress=False)


def test_padding_and_order_do_not_change_values() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(6) < torch.randint(1, 7, (N, 1), generator=generator)
    values = [{f"l{i}": torch.randn(N, 6, 5, generator=generator) for i in range(2)} for _ in range(2)]
    ids = range(N)
    order = torch.randperm(N, generator=generator)

    def side(number: int, fill: float, order: Tensor) -> Activations:
        held = {k: torch.where(mask[..., None], v, fill)[order].double() for k, v in values[number].items()}
        return Activations(held, [ids[i] for i in order], mask=mask[order])

    for rows in ("positions", "mean", "last"):
        plain = compare(side(0, 0.0, torch.arange(N)), side(1, 0.0, torch.arange(N)), rows=rows, progress=False)  # type: ignore[call-overload]
        odd = compare(side(0, 1e9, order), side(1, float("nan"), order), rows=rows, progress=False)  # type: ignore[call-overload]
        np.testing.assert_allclose(odd["linear_cka"], plain["linear_cka"], atol=1e-10)


def counted(adapter: Adapter, call: Callable[[], Any]) -> int:
    """Count the forwards of a call; a hook would make another network of the adapter's."""
    calls, real = [], adapter.run_with_callback
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "run_with_callback", lambda *args, **given: calls.append(1) or real(*args, **given))
        call()
    return len(calls)


def test_each_network_runs_once_per_batch(cnn: Adapter, vit: Adapter, images: Tensor) -> None:
    metrics, probes, batches = ["linear_cka", "procrustes", "rsa"], 1, 4

    def run(b: Adapter = vit, job: Any = compare, *planned: Any) -> Callable[[], Any]:
        return lambda: job(*planned, cnn, b, images, metrics=metrics, batch_size=16, progress=False)

    assert cnn.layers and vit.layers  # verify the cuts before forwards are counted
    assert counted(cnn, run()) == counted(vit, run()) == probes + batches
    assert counted(cnn, run(b=cnn)) == probes + batches
    assert counted(cnn, run(vit, hf_stitch.plan, compare)) == probes + 2


@pytest.mark.parametrize("metric", ["linear_cka", DEBIASED, "procrustes"])
def test_routes_agree(cnn: Adapter, vit: Adapter, images: Tensor, metric: Any, monkeypatch: Any) -> None:
    found = {}
    built = registries.metrics.build(metric)
    for route in built.routes:
        way = route.name
        monkeypatch.setattr(type(built), "routes", (route,))
        atlas = compare(cnn, vit, images, metrics=[metric], progress=False)
        (found[way],) = atlas.values.values()
        assert [*atlas.routes.values()] == [way]
    first, second = found.values()
    np.testing.assert_allclose(first, second, rtol=1e-9, atol=1e-9)


def test_routes_follow_cost_and_memory(monkeypatch: Any) -> None:
    def route(n: int, width: int) -> str:
        side = Activations({"a": torch.randn(n, width)}, range(n))
        return compare(side, side, progress=False).routes["linear_cka"]

    assert (route(400, 4), route(500, 400)) == ("moments", "grams")
    monkeypatch.setattr(comparing_module, "free_memory", lambda device: 6_000_000)
    assert route(500, 400) == "moments"
    monkeypatch.setattr(comparing_module, "free_memory", lambda device: 4_000_000)
    with pytest.raises(ValueError, match=r"linear_cka does not fit .* moments 2\.56 MB, grams 4 MB; select fewer"):
        route(500, 400)


def test_a_network_compared_with_itself(vit: Adapter, cnn: Adapter, images: Tensor) -> None:
    for adapter, rows in ((vit, "resized"), (cnn, "mean")):
        atlas = compare(adapter, adapter, images, metrics=["linear_cka", "rsa"], rows=rows, progress=False)  # type: ignore[call-overload]
        for values in atlas.values.values():
            np.testing.assert_allclose(np.diag(values), 1, atol=1e-12)
            np.testing.assert_array_equal(values, values.T)
        assert atlas.best_matches() == {layer: layer for layer in adapter.layers}


def test_layers_need_not_be_cuts(points: Tensor) -> None:
    a = mlp(0, nn.Identity())
    atlas = compare(a, a, points, layers_a=["0", "1", "2"], layers_b=["0", "2"], progress=False)
    with torch.no_grad():
        before = a.model[0](points)  # overwritten by the in-place activation
    layers = {"0": before, "2": before.relu()}
    want = expected(registries.metrics.build("linear_cka"), layers, layers)
    np.testing.assert_allclose(atlas["linear_cka"][[0, 2]], want, rtol=1e-12)
    np.testing.assert_array_equal(atlas["linear_cka"][0], atlas["linear_cka"][1])


def test_a_plan_contains_routes_and_costs(cnn: Adapter, vit: Adapter, images: Tensor) -> None:
    plan = hf_stitch.plan(compare, cnn, vit, images, metrics=["linear_cka", "rsa"])
    assert isinstance(plan, ComparisonPlan) and plan.fits
    assert [(r.metric, r.name, r.chosen) for r in plan.routes][-1] == ("rsa", "features", True)
    assert sum(r.chosen for r in plan.routes) == 2 and plan.seconds > 0
    for word in ("4 × 3 layers, 61 samples", "moments", "grams", "features", "kB", "forwards"):
        assert word in str(plan)
    held = [route for route in plan.routes if route.chosen]
    assert sum(plan.memory.values()) - plan.memory["networks"] == sum(route.memory for route in held)
    assert plan.disk == {"rows of features": sum(route.disk for route in held)}


def test_best_matches_table_and_figure_of_an_atlas(cnn: Adapter, vit: Adapter, images: Tensor) -> None:
    atlas = compare(cnn, vit, images, metrics=["linear_cka", "procrustes"], progress=False)
    assert atlas.recipe["a"]["reference"]["weights_hash"] == cnn.pinned.weights_hash
    assert atlas.distances == ("procrustes",)
    for axis, own, other in (("a", atlas.layers_a, atlas.layers_b), ("b", atlas.layers_b, atlas.layers_a)):
        distances = atlas["procrustes"] if axis == "a" else atlas["procrustes"].T
        best = {layer: other[row.argmin()] for layer, row in zip(own, distances, strict=True)}
        assert atlas.best_matches("procrustes", axis=axis) == best  # type: ignore[arg-type]
    frame = atlas.to_pandas()
    assert list(frame.columns) == ["metric", "layer_a", "layer_b", "value"] and len(frame) == 2 * 4 * 3
    line = frame.query("metric == 'procrustes' and layer_a == @cnn.layers[2] and layer_b == @vit.layers[1]")
    assert line["value"].item() == atlas["procrustes"][2, 1]
    assert len(atlas.plot("procrustes").axes[0].patches) == 4
    assert "Best matches among 3 layers of b" in str(atlas)
    with pytest.raises(KeyError, match="one of linear_cka, procrustes, got 'cka'"):
        atlas["cka"]


@pytest.mark.parametrize(("name", "pooling"), [("a.npz", "mean"), ("a.safetensors", "none"), ("a", "none")])
def test_saved_activations_replace_a_network(
    cnn: Adapter, vit: Adapter, images: Tensor, tmp_path: Path, name: str, pooling: Any
) -> None:
    live = compare(vit, cnn, images, rows=ROWS_OF[pooling], progress=False)
    saved = []
    for adapter in (vit, cnn):
        kept = extract_activations(adapter, images, pooling=pooling, batch_size=16, progress=False)
        kept.save(tmp_path / adapter.layers[0] / name)
        saved.append(Activations.load(tmp_path / adapter.layers[0] / name))
    for a, b, data in ((saved[0], cnn, images), (vit, saved[1], images), (saved[0], saved[1], None)):
        atlas = compare(a, b, data, rows=ROWS_OF[pooling], progress=False)
        np.testing.assert_allclose(atlas["linear_cka"], live["linear_cka"], rtol=1e-9)
    assert atlas.recipe["a"] == {"activations": saved[0].fingerprint}


def test_the_fingerprint_of_activations_changes_with_each_part() -> None:
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    parts: dict[str, Any] = {"values": {"a": torch.ones(2, 4, 3)}, "ids": [0, 1], "pooling": "none", "mask": mask}
    others: list[dict[str, Any]] = [
        {"values": {"b": torch.ones(2, 4, 3)}}, {"values": {"a": torch.ones(2, 4, 3).bfloat16()}},
        {"values": {"a": torch.ones(2, 6, 2)}, "mask": None}, {"ids": [0, 2]}, {"pooling": None}, {"mask": None},
        {"mask": mask.flip(1)}, {"grids": {"a": (2, 2)}}, {"grids": {"a": (4, 1)}},
    ]  # fmt: skip
    found = [Activations(**{**parts, **other}).fingerprint for other in ({}, *others)]
    assert len({*found}) == len(found) and Activations(**parts).fingerprint == found[0]


def test_bad_input_is_rejected_early(cnn: Adapter, vit: Adapter, images: Tensor, points: Tensor) -> None:
    def refused(match: str, *args: Any, error: type[Exception] = ValueError, **options: Any) -> None:
        with pytest.raises(error, match=match):
            compare(*args, progress=False, **options)

    a = mlp(0)
    saved = Activations({"l": torch.randn(N, 3)}, range(N), pooling="mean")
    refused("is empty", a, a, points[:0])
    refused("at least 2 samples, got 1", a, a, points[:1])
    refused("at least 3 samples, got 2", _wide(0, 8), _wide(1, 8), points[:2].float(), rows="flat")
    refused("b is saved activations; leave paired_data out", saved, saved, paired_data=points)
    refused(r"linear_cka\(debiased=True\) requires at least 4 samples, got 3", a, a, points[:3], metrics=[DEBIASED])
    refused("mutual_knn requires at least 11 samples, got 9", a, a, points[:9], metrics=["mutual_knn"])
    wide = Activations({"w": torch.randn(N, N - 1), "v": torch.randn(N, N + 5)}, range(N))
    for metric in ("cca", "pwcca", registries.metrics.build("shape_distance", alpha=0.5)):
        few = r"requires at least 62 samples for layers of a with 60 features \('w'\), "
        few += r"68 samples for layers of a with 66 features \('v'\), got 61; pass more"
        refused(few, wide, wide, metrics=[metric])
    many = Activations({f"l{i}": torch.randn(N, N) for i in range(5)}, range(N))
    too_few = r"63 samples for layers of a with 61 .*'l0', 'l1', 'l2' and 2 more\), got 61; pass"
    refused(too_few, many, saved, metrics=["linear_regression"])
    assert compare(saved, many, metrics=["linear_regression"], progress=False).n == N
    assert compare(wide, wide, metrics=[registries.metrics.build("cca", ridge=0.1)], progress=False).n == N
    refused("a is a network and requires samples", a, saved)
    refused("leave data out", saved, saved, points)
    refused("rows='cls' requires activations with pooling='cls', but a was recorded", saved, saved, rows="cls")
    refused(r"They have different samples \(60 and 61\)", a, saved, points[:60])
    refused("in a different order", saved, Activations({"l": torch.randn(N, 3)}, range(N)[::-1]))
    vectors = Activations({"l": torch.randn(N, 3)}, range(N))
    refused(r"'layer1.0' of a and 'l' of b: rows='resized'", cnn, vectors, images, rows="resized")
    refused("compares outputs, not layers", a, a, points, metrics=["disagreement"])
    refused("name each method once", a, a, points, metrics=["rsa", "rsa"])
    refused("at least one metric", a, a, points, metrics=[])
    refused("write", a, a, points, metrics="rsa", error=TypeError)
    refused("widths", a, a, points, layers_a=["2"], layers_b=["0"], metrics=["direct_matching"])
    refused("got 'll'; did you mean 'l'", saved, saved, layers_a=["ll"])
    refused("does not exist", a, a, points, layers_a=["7"], error=NotACutError)
    whole = Activations({"l": torch.full((N, 1), 2.0)}, range(N), mask=None)
    refused("linear_cka is undefined for all pairs of layers; layer 'l' of a .* is the layer dead", whole, whole)
    refused("same kind of samples, got image and tensor", vit, a, images)


def test_errors_in_the_data_name_layer_and_sample(points: Tensor) -> None:
    a = mlp(0)
    broken = points.clone()
    broken[37, 0] = float("nan")
    with pytest.raises(ValueError, match="layer '0' is NaN or infinite for sample 37"):
        compare(a, a, broken, batch_size=8, progress=False)
    ids = [f"s{i}" for i in range(N)]
    mask = torch.ones(N, 4, dtype=torch.bool)
    mask[40] = False
    masked = Activations({"l": torch.randn(N, 4, 3)}, ids, mask=mask)
    for rows in ("mean", "positions"):
        with pytest.raises(ValueError, match="sample 's40' is fully masked at layer 'l'"):
            compare(masked, masked, rows=rows, batch_size=8, progress=False)  # type: ignore[call-overload]
    none = Activations({"l": torch.randn(N, 4, 3)}, ids, mask=torch.zeros(N, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="sample 's0' is fully masked at layer 'l'"):
        compare(none, none, progress=False)
    constant = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
    constant[:, 1] = 0.5
    partly = Activations({"partly": constant}, ids)
    for metric in ("linear_cka", "cca", "pwcca"):
        assert compare(partly, partly, metrics=[metric], progress=False)[metric].item() == pytest.approx(1)


def test_an_undefined_pair_has_a_reason_and_takes_no_part() -> None:
    g = torch.Generator().manual_seed(0)
    live = torch.randn(N, 3, generator=g)
    sides = {"live": live, "dead": torch.full((N, 3), 0.1), "wide": torch.randn(N, N, generator=g)}
    dead = Activations(sides, range(N))
    metrics = ["linear_cka", DEBIASED, MINIBATCH, "cca", "rsa", "procrustes"]
    atlas = compare(dead, dead, metrics=metrics, permutations=9, progress=False)
    for metric in atlas.values:
        nan, gone = np.isnan(atlas[metric]), np.array([False, True, metric == "cca"])
        assert (nan == gone[:, None] | gone).all(), metric
        assert all(atlas.why(metric, atlas.layers_a[i], atlas.layers_b[j]) for i, j in np.argwhere(nan))
        assert atlas.why(metric, "live", "live") is None
        assert atlas.best_matches(metric, axis="b")["live"] == "live"
        assert "dead" not in atlas.best_pair(metric)
        assert "dead" not in atlas.best_matches(metric) and "dead" not in atlas.match_p_values(metric)
        assert (np.isnan(atlas.p_values(metric)) == nan).all() and atlas.plot(metric).axes
    alone = compare(dead, dead, layers_a=["live"], layers_b=["live"], metrics=["cca"], permutations=9, progress=False)
    assert atlas.p_values("cca")[0, 0] == alone.p_values()[0, 0]  # the only pair of this metric
    assert len(atlas.undefined) == 5 * 5 + 8
    assert "at least 62 rows, got 61, as y has rank 60" in str(atlas.why("cca", "live", "wide"))
    assert "is the layer dead" in str(atlas.why("linear_cka", "dead", "live"))
    frame = atlas.to_pandas()
    assert frame["undefined"].notna().sum() == frame["value"].isna().sum() == len(atlas.undefined)
    assert "cca is undefined for 8 of 9 pairs, first live -> dead" in " ".join(str(atlas).split())
    again = SimilarityAtlas.from_dict(atlas.to_dict())
    assert again.undefined == atlas.undefined and again.to_pandas().equals(frame)


def test_features_keep_their_order_where_it_matters(cnn: Adapter, images: Tensor) -> None:
    kept = extract_activations(cnn, images, pooling="flatten", progress=False)
    layers = {"layers_a": [cnn.layers[0]], "layers_b": [cnn.layers[0]]}
    for metric in ("paired_cosine", MINIBATCH):
        atlas = compare(cnn, kept, images, **layers, metrics=[metric], rows="flat", progress=False)
        np.testing.assert_allclose(next(iter(atlas.values.values())), 1, rtol=1e-9)


def test_overflowing_products_are_reported() -> None:
    side = Activations({"l": torch.randn(16, 5) * 1e20}, range(16))
    with pytest.raises(ValueError, match=r"products of layer 'l' overflow torch.float32"):
        compare(side, side, metrics=[MINIBATCH], batch_size=16, progress=False)


def test_activations_reject_bad_input(tmp_path: Path) -> None:
    def refused(match: str, call: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=match):
            call()

    refused("at least one layer", lambda: Activations({}, []))
    refused("int64 of", lambda: Activations({"l": torch.zeros(3, 2, dtype=torch.int64)}, range(3)))
    refused("complex64", lambda: Activations({"l": torch.zeros(3, 2, dtype=torch.complex64)}, range(3)))
    refused("3 samples, but there are 2 ids", lambda: Activations({"l": torch.zeros(3, 2)}, range(2)))
    refused("unique", lambda: Activations({"l": torch.zeros(2, 2)}, ["a", "a"]))
    narrow = Activations({"l": torch.zeros(2, 2, dtype=torch.bfloat16)}, ["a", "b"])
    refused("bfloat16", lambda: narrow.save(tmp_path / "a.npz"))
    narrow.save(tmp_path / "a.safetensors")
    again = Activations.load(tmp_path / "a.safetensors")
    assert again.values["l"].dtype == torch.bfloat16 and again.ids == ("a", "b")
    np.savez(tmp_path / "b.npz", l=np.zeros((2, 2)))
    refused("does not contain ids", lambda: Activations.load(tmp_path / "b.npz"))
    assert Activations.load(tmp_path / "b.npz", ids=[4, 5]).ids == (4, 5)
    with pytest.raises(FileNotFoundError, match="no activations at"):
        Activations.load(tmp_path / "c.npz")


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors", "a"])
def test_what_is_no_file_of_activations_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    Activations({"l": torch.zeros(3, 2)}, range(3)).save(path)
    (path / "activations.json" if path.is_dir() else path).write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(ValueError, match=rf"{path} cannot be read"):
        Activations.load(path)


def test_activations_that_unpack_to_much_more_than_their_file_are_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", ids=np.arange(2**18), l=np.zeros((2**18, 300), np.float32))
    with pytest.raises(ValueError, match=r"a\.npz cannot be read: it unpacks to 31\d MB"):
        Activations.load(tmp_path / "a.npz")


def test_images_that_a_folder_names_as_ids_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(*_: Any, **__: Any) -> None:
        raise AssertionError("an image was fetched")

    monkeypatch.setattr(datasets.Image, "decode_example", fetched)
    column = [{"bytes": b"", "path": None}]
    features = datasets.Features({"ids": datasets.Image(), "l": datasets.List(datasets.Value("float32"))})
    datasets.Dataset.from_dict({"ids": column, "l": [[1.0, 2.0]]}, features).save_to_disk(str(tmp_path))
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be read"):
        Activations.load(tmp_path)


def test_the_mask_is_kept_when_a_vector_comes_first(net: Any, texts: Any) -> None:
    bert = net("bert")
    words = texts[:10]
    layers = ["bert.pooler", "bert.encoder.layer.0"]
    recorded = extract_activations(bert, words, layers=layers, pooling="none", progress=False)
    assert recorded.mask is not None and torch.equal(recorded.mask, bert.preprocess(words)["attention_mask"].bool())


def atlas_of(values: Any, a: Any, b: Any, metric: str = "linear_cka", **more: Any) -> SimilarityAtlas:
    return SimilarityAtlas({metric: np.array(values)}, tuple(a), tuple(b), 50, "mean", {metric: "moments"}, **more)


def test_the_headline_counts_the_layers_that_match_their_namesake() -> None:
    names = ("l0", "l1", "l2")
    atlas = atlas_of([[0.9, 0.7, 0.1], [0.8, 0.6, 0.2], [0.5, 0.7, 0.7]], names, names)
    assert atlas.headline() == (
        "1 of 3 layers of a match their namesake in b by linear_cka (1 tie); "
        "closest runner-up: l1 for l0, 0.700 after 0.900"
    )
    found = atlas.identify()
    assert found.verdicts("a").tolist() == [["hit", "miss", "tie"]] and found.layers == names
    shown = " ".join(str(atlas).split())
    assert shown.startswith("1 of 3 layers of a match their namesake in b by linear_cka (1 tie)")
    for row in ("│ l0 │ l0 0.900 │ l1 0.700 │ 0.900 │", "│ l1 │ l0 0.800 │ l1 0.600 │ 0.600 │"):
        assert row in shown


def test_layers_that_nearly_agree_are_not_printed_as_equal() -> None:
    """The layers of a network in int8 and in float32 have a CKA of 0.9999997."""
    atlas = atlas_of([[1.0, 0.2], [0.2, 0.99999974]], ("x", "y"), ("x", "y"))
    shown = " ".join(str(atlas).split())
    assert "│ x │ x 1.000 │" in shown and "│ y │ y 0.99999974 │" in shown
    atlas = atlas_of([[0.0, 0.2], [0.2, 7.4e-7]], ("x", "y"), ("x", "y"), "direct", distances=("direct",))
    assert "│ y │ y 7.4e-07 │" in " ".join(str(atlas).split())


def test_the_headline_of_layers_without_namesakes_is_the_most_similar_pair() -> None:
    atlas = atlas_of([[0.2, 0.4], [0.9, 0.1]], ("a0", "a1"), ("b0", "b1"))
    assert atlas.headline() == "The most similar layers by linear_cka are a1 of a and b0 of b (0.900)"
    with pytest.raises(ValueError, match="identify requires at least two layers of the same name in a and b, got 0"):
        atlas.identify()
    assert "namesake" not in str(atlas)
    values = [[0.1, 0.9, 0.3], [0.8, 0.2, 0.1]]  # only layers that both have are identified, and distances are lower
    atlas = atlas_of(values, ("x", "y"), ("x", "z", "y"), "procrustes", distances=("procrustes",))
    found = atlas.identify("procrustes")
    assert found.layers == ("x", "y", "z") and found.verdicts("a").tolist() == [["hit", "hit", "undefined"]]
    assert atlas.headline() == "The most similar layers by procrustes are x of a and x of b (0.100)"


def test_networks_of_different_depths_have_no_namesakes_but_relative_depths() -> None:
    """A block of the same number lies elsewhere in a network of twice the depth."""
    a, b = (tuple(f"layer.{number}" for number in range(depth)) for depth in (3, 5))
    values = np.full((3, 5), 0.1)
    values[0, 0] = values[1, 2] = values[2, 3] = 0.9  # depths 0, .5 and .75 for 0, .5 and 1
    atlas = atlas_of(values, a, b)
    assert atlas.headline() == (
        "The most similar layers by linear_cka are layer.0 of a and layer.0 of b (0.900); best matches are 0.08 of the "
        "depth away on average (by chance 0.43)"
    )
    assert "namesake" not in str(atlas)


def test_several_metrics_show_the_value_of_the_namesake_where_another_layer_matches() -> None:
    values = {"linear_cka": np.array([[0.2, 0.4], [0.9, 0.1]]), "procrustes": np.array([[0.1, 0.5], [0.6, 0.2]])}
    routes = dict.fromkeys(values, "moments")
    shown = " ".join(str(SimilarityAtlas(values, ("x", "y"), ("x", "y"), 9, "mean", routes, ("procrustes",))).split())
    assert "│ x │ y 0.400 (x 0.200) │ x 0.100 │" in shown
    assert "0 of 2 layers of a match their namesake in b by linear_cka" in shown
    assert "2 of 2 layers of a match their namesake in b by procrustes" in shown


def _wide(seed: int, width: int) -> hf_stitch.Adapter:
    torch.manual_seed(seed)
    return hf_stitch.load(nn.Sequential(nn.Linear(4, width), nn.Tanh()), example_inputs=torch.randn(2, 4))


def test_a_value_that_independent_rows_reach_too_is_undefined_with_the_reason() -> None:
    a, b = _wide(0, 200), _wide(1, 200)
    with pytest.raises(ValueError, match=r"independent rows score 0\.9\d on 10 samples .*pass more samples.*debiased"):
        compare(a, b, torch.randn(10, 4), rows="flat", progress=False)
    enough = compare(a, b, torch.randn(60, 4), rows="flat", progress=False)
    debiased = compare(a, b, torch.randn(10, 4), metrics=["linear_cka:debiased=True"], rows="flat", progress=False)
    assert not enough.undefined and not debiased.undefined
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 200), nn.Tanh())
    both = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
    layers: dict[str, Any] = {"layers_a": ["1", "3"], "layers_b": ["1", "3"]}
    atlas = compare(both, both, torch.randn(10, 4), **layers, rows="flat", progress=False)
    assert np.isnan(atlas["linear_cka"]).tolist() == [[False, False], [False, True]]  # of pairs that are too wide


def test_unbiased_values_of_wide_layers_need_no_values_of_independent_rows(monkeypatch: Any) -> None:
    monkeypatch.setattr(comparing_module, "_chance", None)
    found = compare(_wide(0, 200), _wide(1, 200), torch.randn(10, 4), metrics=[DEBIASED, MINIBATCH], progress=False)
    assert not found.undefined
