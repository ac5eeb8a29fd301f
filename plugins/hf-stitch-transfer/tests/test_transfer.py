"""Probes, directions and sparse autoencoders that are carried through a stitch."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_transfer import SparseAutoencoder, transfer_direction, transfer_probe, transfer_sae
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from torch import Tensor

import hf_stitch
from hf_stitch.relative import RelativeProjection
from hf_stitch.stitches import IdentityStitch, LinearStitch, LowRankStitch

ARCHITECTURES: list[dict[str, Any]] = [
    {}, {"apply_b_dec_to_input": True}, {"architecture": "jumprelu"}, {"architecture": "topk", "k": 3},
]  # fmt: skip


def affine(p: int, q: int, seed: int = 0) -> LinearStitch:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((q, p), (q,)))
    return LinearStitch.of(weight=weight, bias=bias)


def rows(n: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def autoencoder(width: int, features: int = 12, **options: Any) -> SparseAutoencoder:
    torch.manual_seed(0)
    made = SparseAutoencoder(width, features, dtype=torch.float64, metadata={"hook_name": "blocks.3"}, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            drawn = torch.randn_like(parameter)
            parameter.copy_(drawn.abs() if parameter is made.threshold else drawn)
    return made


@pytest.mark.parametrize("options", ARCHITECTURES, ids=str)
def test_an_autoencoder_computes_the_formula_of_its_architecture(options: dict[str, Any]) -> None:
    made, x = autoencoder(5, **options), rows(40, 5)
    hidden = (x - made.b_dec if made.apply_b_dec_to_input else x) @ made.W_enc + made.b_enc
    active = hidden > (0 if made.threshold is None else made.threshold)
    if made.k is not None:
        active &= hidden >= hidden.sort(1).values[:, [-made.k]]
    assert active.any() and not active.all()
    torch.testing.assert_close(made.encode(x), torch.where(active, hidden, 0))
    torch.testing.assert_close(made(x), torch.where(active, hidden, 0) @ made.W_dec + made.b_dec)


@given(p=st.integers(1, 7), q=st.integers(1, 7), seed=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_a_probe_of_the_target_reads_mapped_activations(p: int, q: int, seed: int) -> None:
    stitch, x = affine(p, q, seed), rows(9, p, seed)
    weight, bias = rows(3, q, seed + 1), rows(1, 3, seed + 2)[0]
    carried = transfer_probe((weight, bias), stitch, to="source")
    torch.testing.assert_close(x @ carried[0].T + carried[1], stitch(x) @ weight.T + bias)
    (alone, added) = transfer_probe((weight[0], bias[0]), stitch, to="source")
    torch.testing.assert_close(x @ alone + added, stitch(x) @ weight[0] + bias[0])


@pytest.mark.parametrize("q", [4, 6])
def test_a_probe_of_the_source_reads_activations_that_are_mapped_back(q: int) -> None:
    """Where the target is as wide as the source, the pseudo-inverse loses nothing."""
    stitch, x, probe = affine(4, q), rows(9, 4), (rows(3, 4, 5), rows(1, 3)[0])
    carried = transfer_probe(probe, stitch, rcond=1e-9)
    torch.testing.assert_close(stitch(x) @ carried[0].T + carried[1], x @ probe[0].T + probe[1])
    reverse = affine(q, 4, 3)
    through = transfer_probe(probe, stitch, reverse=reverse)
    y = rows(9, q)
    torch.testing.assert_close(y @ through[0].T + through[1], reverse(y) @ probe[0].T + probe[1])
    again = transfer_probe(carried, stitch, to="source")
    torch.testing.assert_close(again[0], probe[0])


def test_rcond_drops_directions_that_the_stitch_hardly_keeps() -> None:
    stitch = LinearStitch.of(weight=torch.diag(torch.tensor([1.0, 1e-3])), bias=torch.zeros(2))
    probe = (torch.eye(2), torch.zeros(2))
    assert transfer_probe(probe, stitch, rcond=1e-6)[0].diagonal().tolist() == pytest.approx([1, 1000])
    assert transfer_probe(probe, stitch, rcond=1e-2)[0].diagonal().tolist() == pytest.approx([1, 0])


@pytest.mark.parametrize(
    "made",
    [
        LogisticRegression(),
        LogisticRegression(fit_intercept=False),
        LinearSVC(),
        Ridge(),
        Ridge(fit_intercept=False),
        LinearRegression(),
        RidgeClassifier(),
        LinearDiscriminantAnalysis(),
    ],
    ids=lambda made: type(made).__name__,
)
@pytest.mark.parametrize("classes", [2, 3])
def test_linear_models_of_scikit_learn(made: Any, classes: int) -> None:
    stitch, x = affine(5, 4), rows(90, 5)
    with torch.no_grad():
        y = stitch(x).numpy()
    labels = np.digitize(y[:, 0], np.quantile(y[:, 0], np.arange(1, classes) / classes))
    probe = made.fit(y, labels)
    before = probe.coef_.copy()
    carried = transfer_probe(probe, stitch, to="source")
    np.testing.assert_allclose(carried.predict(x.numpy()), probe.predict(y), atol=1e-9)
    if hasattr(probe, "decision_function"):
        np.testing.assert_allclose(carried.decision_function(x.numpy()), probe.decision_function(y), atol=1e-9)
    assert carried.n_features_in_ == 5
    np.testing.assert_array_equal(probe.coef_, before)


def test_what_is_no_linear_probe_is_refused() -> None:
    stitch, x = affine(5, 4), rows(30, 4).numpy()
    with pytest.raises(TypeError, match=r"must predict from activations .* got SVC"):
        transfer_probe(SVC(kernel="linear").fit(x, x[:, 0] > 0), stitch, to="source")
    with pytest.raises(TypeError, match=r"two tensors \(weight, bias\), got \(ndarray, ndarray\)"):
        transfer_probe((np.eye(4), np.zeros(4)), stitch, to="source")
    with pytest.raises(ValueError, match=r"the bias of the probe must have the shape \(4,\), .* got \(5, 1\)"):
        transfer_probe((torch.eye(4), torch.zeros(5, 1)), stitch, to="source")
    with pytest.raises(TypeError, match="the direction must be floating point"):
        transfer_direction(torch.tensor([1, 0, 0, 1, 0]), stitch)


def test_a_layer_of_torch() -> None:
    stitch, probe = affine(5, 4), torch.nn.Linear(4, 3, bias=False)
    carried = transfer_probe(probe, stitch, to="source")
    assert isinstance(carried, torch.nn.Linear) and carried.weight.dtype == torch.float32
    x = rows(6, 5).float()
    torch.testing.assert_close(carried(x), probe(stitch(x.double()).float()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray])
def test_directions(kind: Any) -> None:
    stitch, v = affine(5, 4), rows(2, 5)
    x = rows(1, 5)
    carried = transfer_direction(kind(v), stitch)
    assert type(carried) is type(kind(v))
    with torch.no_grad():
        torch.testing.assert_close(torch.as_tensor(carried), stitch(x + v) - stitch(x))
    q, _ = torch.linalg.qr(rows(5, 5))
    turn = LinearStitch.of(weight=q, bias=torch.ones(5).double())
    back = transfer_direction(transfer_direction(kind(v), turn), turn, to="source", rcond=1e-9)
    torch.testing.assert_close(torch.as_tensor(back), v)


@pytest.mark.parametrize("options", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("to", ["target", "source"])
def test_a_carried_autoencoder_maps_encodes_decodes_and_maps(options: dict[str, Any], to: Any) -> None:
    stitch, reverse = affine(5, 4), affine(4, 5, 7)
    there, back, width = (stitch, reverse, 5) if to == "target" else (reverse, stitch, 4)
    own = autoencoder(width, **options)
    carried = transfer_sae(own, stitch, to=to, reverse=reverse)
    x = rows(20, 9 - width)
    with torch.no_grad():
        torch.testing.assert_close(carried.encode(x), own.encode(back(x)))
        torch.testing.assert_close(carried(x), there(own(back(x))))
    assert (carried.architecture, carried.k) == (own.architecture, own.k)
    assert carried.metadata == {"hook_name": "blocks.3", "carried_to": to}


@pytest.mark.parametrize("options", ARCHITECTURES, ids=str)
def test_files_of_saelens(options: dict[str, Any], tmp_path: Path) -> None:
    own = autoencoder(4, **options)
    own.save_saelens(tmp_path)
    again = SparseAutoencoder.from_saelens(tmp_path)
    x = rows(7, 4)
    assert torch.equal(again(x), own(x)) and again.metadata == own.metadata
    config = json.loads((tmp_path / "cfg.json").read_text())
    assert (config["d_in"], config["d_sae"], config["dtype"]) == (4, 12, "float64")
    assert set(load_file(tmp_path / "sae_weights.safetensors")) >= {"W_enc", "W_dec", "b_enc", "b_dec"}


def test_older_configs_and_what_is_not_supported(tmp_path: Path) -> None:
    autoencoder(4).save_saelens(tmp_path)
    config = json.loads((tmp_path / "cfg.json").read_text())

    def read(**changes: Any) -> SparseAutoencoder:
        values = {key: value for key, value in {**config, **changes}.items() if value != "gone"}
        (tmp_path / "cfg.json").write_text(json.dumps(values))
        return SparseAutoencoder.from_saelens(tmp_path)

    assert read(architecture="gone", activation_fn_str="relu").architecture == "standard"
    found = read(activation_fn_str="topk", activation_fn_kwargs={"k": 2})
    assert (found.architecture, found.k) == ("topk", 2)
    for changes, message in (
        ({"architecture": "gated"}, "is a gated autoencoder"),
        ({"activation_fn_str": "tanh-relu"}, "activation 'tanh-relu'"),
        ({"normalize_activations": "layer_norm"}, "normalize_activations='layer_norm'"),
        ({"architecture": "jumprelu"}, "does not match a jumprelu autoencoder"),
    ):
        with pytest.raises(ValueError, match=message):
            read(**changes)
    (tmp_path / "cfg.json").write_text("[")
    with pytest.raises(ValueError, match="cannot be read"):
        SparseAutoencoder.from_saelens(tmp_path)
    (tmp_path / "cfg.json").write_text("{}")
    save_file({"W": torch.zeros(2)}, tmp_path / "sae_weights.safetensors")
    with pytest.raises(ValueError, match="must contain a matrix W_enc, got W"):
        SparseAutoencoder.from_saelens(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"must contain cfg.json"):
        SparseAutoencoder.from_saelens(tmp_path / "none")


def test_every_form_of_an_affine_stitch() -> None:
    nets = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)) for _ in range(2)]
    a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = hf_stitch.stitch(a, b, torch.randn(90, 4), source_layer="1", target_layer="1", progress=False)
    v = torch.randn(8)
    wanted = transfer_direction(v, model.stitch.body)
    for stitch in (model, model.stitcher, model.stitch):
        assert torch.equal(transfer_direction(v, stitch), wanted)
    assert torch.equal(transfer_direction(v, IdentityStitch(8, 8)), v)
    assert transfer_direction(v, LowRankStitch(8, 3, rank=2)).shape == (3,)


def test_bad_input() -> None:
    stitch, probe, v = affine(5, 4), (rows(3, 4), rows(1, 3)[0]), rows(1, 5)[0]
    for call, message in (
        (lambda: transfer_probe((rows(3, 5), rows(1, 3)[0]), stitch), "pass rcond"),
        (lambda: transfer_probe(probe, stitch, to="source", rcond=0.1), "`rcond` is not used"),
        (lambda: transfer_direction(v, stitch, reverse=affine(4, 5)), "`reverse` is not used"),
        (lambda: transfer_direction(v, stitch, to="there"), "to must be one of 'source', 'target'"),
        (lambda: transfer_direction(v, stitch, to="source", rcond=2.0), "rcond must be a number > 0"),
        (lambda: transfer_direction(v, stitch, to="source", rcond=0.1, reverse=stitch), "pass only one"),
        (
            lambda: transfer_direction(v, stitch, to="source", rcond=0.1),
            "the direction must have width 4 like the target",
        ),
        (lambda: transfer_direction(v, stitch, to="source", reverse=affine(5, 4)), "must map 4 -> 5"),
        (lambda: transfer_direction(v * torch.nan, stitch), "NaN or infinite"),
        (lambda: transfer_probe((rows(3, 5), rows(1, 3)[0]), stitch, to="source"), "the probe must have width 4"),
        (lambda: transfer_sae(autoencoder(6), stitch, rcond=0.1), "the autoencoder must have width 5 like the source"),
        (lambda: transfer_direction(rows(1, 6)[0], RelativeProjection.of(rows(3, 6))), "is not an affine map"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="got Pipeline; for a pipeline, fold the scaling"):
        transfer_probe(make_pipeline(StandardScaler(), Ridge()), stitch, to="source")
    with pytest.raises(TypeError, match="stitch must be a Stitch or"):
        transfer_direction(v, torch.nn.Linear(5, 4))  # type: ignore[arg-type]
    for options in ({"architecture": "gated"}, {"k": 3}, {"architecture": "topk"}, {"architecture": "topk", "k": 99}):
        with pytest.raises(ValueError, match=r"architecture|k must be"):
            SparseAutoencoder(4, 12, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="d_in must be an integer >= 1"):
        SparseAutoencoder(0, 12)
