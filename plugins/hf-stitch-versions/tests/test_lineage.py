"""``lineage`` finds relatives of a network however they came about, and nothing in networks that were made apart."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import cache

import kin
import pytest
import torch
from hf_stitch_versions.changes import lineage as module
from hf_stitch_versions.changes.lineage import Lineage, by_cosines, by_invariants, by_place, lineage
from hf_stitch_versions.changes.mixture import mixture
from hf_stitch_versions.changes.units import layers
from scipy import stats
from torch import Tensor, nn

from tests import tiny_networks  # isort: skip

FAMILIES = ("llama", "gpt2", "bert", "vit", "mlp", "vgg", "resnet20")
STREAMS = tuple(family for family in FAMILIES if family not in kin.CHAINS)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def network(family: str, seed: int = 0) -> kin.Weights:
    return kin.read(kin.build(family, seed))


def hidden(family: str) -> str:
    return "c" if family in kin.CHAINS else "h"


def channels(family: str) -> str:
    return "s" if family == "resnet20" else "d"


def reordered(weights: kin.Weights, family: str, axes: str, seed: int = 0) -> kin.Weights:
    return kin.turned(weights, family, axes, kin.permutation(generator(seed)))


def told(family: str, b: kin.Weights) -> Lineage:
    a = network(family)
    return lineage(a, b, kin.blocks(a))


# -- the corpus --------------------------------------------------------------------------------------------------------
def outputs(model: nn.Module) -> Tensor:
    model = copy.deepcopy(model).double()
    if hasattr(model, "config") and not hasattr(model, "vit"):
        data = torch.randint(3, 60, (2, 12), generator=generator())
    else:
        shape = (
            (2, 48) if isinstance(model[1] if isinstance(model, nn.Sequential) else None, nn.Linear) else (2, 3, 32, 32)
        )
        data = torch.randn(shape, generator=generator(), dtype=torch.float64)
    with torch.no_grad():
        found = model(data)
    return getattr(found, "logits", found)


@pytest.mark.parametrize("family", FAMILIES)
def test_reordered_networks_compute_the_same(family: str) -> None:
    model = kin.build(family, 0)
    weights = reordered(kin.read(model), family, hidden(family) + channels(family))
    if family in kin.HEADS and family != "llama":
        weights = kin.turned(weights, family, "a", kin.heads(generator(), 4))
    torch.testing.assert_close(outputs(kin.write(copy.deepcopy(model), weights)), outputs(model), rtol=1e-4, atol=1e-5)


def test_a_rotated_llama_computes_the_same() -> None:
    model = kin.build("llama", 0)
    weights = kin.rotated(kin.read(model), "llama", generator())
    torch.testing.assert_close(outputs(kin.write(copy.deepcopy(model), weights)), outputs(model), rtol=1e-4, atol=1e-4)


# -- relatives ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_changed_weights_are_derived(family: str) -> None:
    a = network(family)
    for b in (kin.rounded(a, 4), kin.pruned(a, 0.5), kin.noisy(a, 0.3, generator())):
        found = told(family, b)
        assert (found.verdict, found.rotated) == ("derived", False)
        assert found.cosine > 0.9 > abs(found.cosine_null) + 0.7


@pytest.mark.parametrize("family", FAMILIES)
def test_reordered_hidden_units_are_matched(family: str) -> None:
    b = reordered(kin.noisy(network(family), 0.1, generator()), family, hidden(family))
    found = told(family, b)
    assert (found.verdict, found.rotated) == ("derived, reordered", False)
    assert found.p_place > module.LEVEL > found.p_matched
    assert found.cosine > 0.9


@pytest.mark.parametrize("family", STREAMS)
def test_reordered_channels_are_told(family: str) -> None:
    found = told(family, reordered(network(family), family, channels(family)))
    assert (found.verdict, found.rotated) == ("derived", True)
    both = told(family, reordered(network(family), family, channels(family) + hidden(family)))
    assert (both.verdict, both.rotated) == ("derived, reordered", True)
    assert both.cosine > 0.9


def test_a_rotated_residual_stream_is_told() -> None:
    b = kin.noisy(kin.rotated(network("llama"), "llama", generator()), 0.1, generator())
    found = told("llama", b)
    assert (found.verdict, found.rotated) == ("derived", True)
    assert "rotated" in found.sentence
    assert found.p_matched < module.LEVEL
    both = told("llama", reordered(b, "llama", "h"))
    assert (both.verdict, both.rotated) == ("derived, reordered", True)


@pytest.mark.parametrize("family", FAMILIES)
def test_networks_made_apart_are_not_related(family: str) -> None:
    for seed in (1, 2):
        found = told(family, network(family, seed))
        assert (found.verdict, found.rotated) == ("no evidence", False)
        assert abs(found.cosine) < 0.25
        assert "does not prove" in found.sentence


@pytest.mark.parametrize("family", [*tiny_networks.VISION, *tiny_networks.LANGUAGE])
def test_every_family_has_hidden_units(family: str) -> None:
    a, b, other = (kin.read(tiny_networks.build(family, seed)) for seed in (0, 0, 1))
    assert lineage(a, kin.noisy(b, 0.2, generator()), kin.blocks(a)).verdict == "derived"
    assert lineage(a, other, kin.blocks(a)).verdict == "no evidence"


# -- the tests are exact -----------------------------------------------------------------------------------------------
def test_place_has_the_mean_and_the_variance_of_all_orders() -> None:
    s = torch.randn(6, 6, generator=generator(), dtype=torch.float64)
    sums = torch.stack([s[range(6), list(order)].sum() for order in itertools.permutations(range(6))])
    assert by_place(s).z == pytest.approx(float((s.trace() - sums.mean()) / sums.std(correction=0)))


def test_the_smaller_p_value_of_two_looks_is_doubled() -> None:
    a, b = network("llama"), network("llama", 1)
    parts = layers(a, b, kin.blocks(a))
    looks = [[by_cosines(x.own(a), x.own(b)) for x in parts], [by_invariants(x, a, b) for x in parts]]
    least = min(10 ** module.combine(look).log10_p for look in looks)
    assert lineage(a, b, kin.blocks(a)).p_place == pytest.approx(min(1, 2 * least))


def test_a_weak_agreement_in_another_basis_does_not_count() -> None:
    """Networks trained apart may reach such values after their channels were fitted to each other."""
    a = network("llama")
    b = reordered(kin.noisy(a, 1.4, generator()), "llama", "hd")
    parts = layers(a, b, kin.blocks(a))
    log_p, cosine, _ = module.summary(module.match_all(a, b, parts, module.first_bases(a, b, parts[0])))
    assert log_p < -10
    assert 0.2 < cosine < module.COSINE
    assert told("llama", b).verdict == "no evidence"


@pytest.mark.parametrize("family", ["llama", "vgg"])
def test_p_values_are_uniform_if_only_the_order_is_random(family: str) -> None:
    """The strictest null: B computes what A computes, and only its order has nothing to do with that of A."""
    a = network(family)
    found: dict[str, list[float]] = {"cosines": [], "invariants": [], "matched": []}
    for seed in range(80):
        b = reordered(a, family, hidden(family) + channels(family), seed)
        parts = layers(a, b, kin.blocks(a))
        found["cosines"].append(module.combine([by_cosines(x.own(a), x.own(b)) for x in parts]).z)
        found["invariants"].append(module.combine([by_invariants(x, a, b) for x in parts]).z)
        found["matched"].append(stats.norm.isf(10 ** module.summary(module.match_all(a, b, parts))[0]))
    for name, values in found.items():
        assert stats.kstest(values, "norm").pvalue > 1e-3, name


# -- layers of hidden units --------------------------------------------------------------------------------------------
def shapes(**sizes: tuple[int, ...]) -> kin.Weights:
    g = generator()
    return {name.replace("_", "."): torch.randn(size, generator=g) for name, size in sizes.items()}


def test_layers_of_a_llama_are_its_gates() -> None:
    found = layers(network("llama"), network("llama", 1), kin.blocks(network("llama")))
    assert [layer.block for layer in found] == kin.blocks(network("llama"))
    mlp = "model.layers.0.mlp"
    assert found[0].before == (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
    assert (found[0].after, found[0].units) == (f"{mlp}.down_proj.weight", 48)
    assert (found[0].reads, found[0].writes) == ("stream of 32", "stream of 32")


def test_experts_are_apart_and_fused_gates_are_split() -> None:
    experts = {"h_0_one_in": (24, 8), "h_0_one_out": (8, 12), "h_0_two_in": (24, 8), "h_0_two_out": (8, 12)}
    a = shapes(embed=(50, 8), h_0_router=(2, 8), **experts)
    found = layers(a, a, ["h.0"])
    assert [(layer.before, layer.after, layer.units) for layer in found] == [
        (("h.0.one.in",), "h.0.one.out", 12), (("h.0.two.in",), "h.0.two.out", 12),
    ]  # fmt: skip
    assert [tuple(x.shape) for x in found[0].weights(a)] == [(12, 8, 1)] * 3
    torch.testing.assert_close(found[0].weights(a)[1][..., 0], a["h.0.one.in"][12:])


def test_heads_and_shortcuts_are_no_hidden_units() -> None:
    a = shapes(embed=(50, 8), h_0_attn_q=(24, 8), h_0_attn_o=(8, 24), h_0_in=(12, 8), h_0_out=(8, 12))
    assert [layer.before for layer in layers(a, a, ["h.0"])] == [("h.0.in",)]
    a = shapes(stem=(16, 3, 3, 3), h_0_shortcut=(16, 16, 1, 1), h_0_in=(16, 16, 3, 3), h_0_out=(16, 16, 3, 3))
    assert [layer.before for layer in layers(a, a, ["h.0"])] == [("h.0.in",)]


def test_a_weight_between_two_layers_counts_once() -> None:
    """As weights of units before it and after it, its agreement would count twice, as if found twice."""
    chain = layers(network("vgg"), network("vgg", 1), [])
    assert [len(layer.own(network("vgg"))) for layer in chain] == [1, 1, 1, 1, 2]
    assert [len(layer.weights(network("vgg"))) for layer in chain] == [2] * 5


def test_channels_that_few_samples_write_are_reordered() -> None:
    """A stem of 27 numbers for each of 40 channels determines their order, but no rotation of them."""
    a = shapes(stem=(40, 3, 3, 3), h_0_in=(160, 40), h_0_out=(40, 160))
    order = torch.randperm(40, generator=generator())
    b = {"stem": a["stem"][order], "h.0.in": a["h.0.in"][:, order], "h.0.out": a["h.0.out"][order]}
    found = lineage(a, b, ["h.0"])
    assert (found.verdict, found.rotated) == ("derived", True)
    assert found.cosine == pytest.approx(1)


def test_positions_and_classes_are_no_channels() -> None:
    mixer = shapes(stem=(16, 3, 4, 4), h_0_tokens_in=(24, 10), h_0_tokens_out=(10, 24))
    assert [(layer.reads, layer.writes) for layer in layers(mixer, mixer, ["h.0"])] == [("", "")]
    chain = layers(network("mlp"), network("mlp", 1), [])
    assert [(x.reads != "", x.writes != "") for x in chain] == [(False, True), (True, True), (True, False)]
    assert (chain[0].writes, chain[2].reads) == (f"units before {chain[1].after}",) * 2


# -- limits ------------------------------------------------------------------------------------------------------------
def test_wide_layers_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNITS", 20)
    monkeypatch.setattr(module, "CHANNELS", 14)
    for axes, verdict in (("", "derived"), ("h", "derived, reordered"), ("hd", "derived, reordered")):
        assert told("llama", reordered(network("llama"), "llama", axes)).verdict == verdict


def test_what_only_one_network_has_is_left_out() -> None:
    a = network("llama")
    b = {name: x for name, x in a.items() if "layers.1." not in name} | {"adapter.weight": torch.ones(3, 3)}
    b["model.embed_tokens.weight"] = torch.cat(
        [b["model.embed_tokens.weight"], torch.randn(7, 32, generator=generator())]
    )
    found = lineage(a, reordered(b, "llama", "hd"), kin.blocks(a))
    assert [row.block for row in found.blocks] == ["model.layers.0", "model.layers.2"]
    assert (found.verdict, found.rotated) == ("derived, reordered", True)


def test_networks_without_common_layers_tell_nothing() -> None:
    found = lineage(network("llama"), {}, ["model.layers.0"])
    assert (found.verdict, found.p_place, found.p_matched, found.blocks) == ("no evidence", 1.0, 1.0, ())
    assert found.sentence == module.NO_LAYERS


def test_p_values_too_small_for_a_float_have_logarithms() -> None:
    a = shapes(embed=(50, 40), h_0_in=(400, 40), h_0_out=(40, 400))
    found = lineage(a, a, ["h.0"])
    assert found.p_place == 0.0
    assert found.log10_p_place < -400
    assert f"1e{found.log10_p_place:.0f}" in found.sentence


# -- shares ------------------------------------------------------------------------------------------------------------
def test_shares_of_merged_networks() -> None:
    base = network("llama")
    tuned = [kin.noisy(base, 0.05, generator(seed)) for seed in (1, 2)]
    found = mixture(kin.mixed(tuned, (0.3, 0.7)), tuned)
    assert found.shares == pytest.approx((0.3, 0.7), abs=1e-4)
    assert found.residual < 1e-4
    task = mixture(kin.mixed([base, *tuned], (-0.4, 0.6, 0.8)), [base, *tuned])
    assert task.shares == pytest.approx((-0.4, 0.6, 0.8), abs=1e-4)


def test_a_network_that_is_no_mixture_leaves_a_rest() -> None:
    base = network("llama")
    tuned = [kin.noisy(base, 0.05, generator(seed)) for seed in (1, 2)]
    assert mixture(kin.noisy(base, 0.05, generator(3)), tuned).residual == pytest.approx(0.75**0.5, abs=0.02)
    assert mixture(tuned[1], tuned).residual == 0.0


MLP = network("mlp")
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "weights that are not finite": (
        lambda: told("mlp", MLP | {"3.weight": MLP["3.weight"] / 0}), r"3\.weight of B contains .* not finite",
    ),
    "one parent": (lambda: mixture(MLP, [MLP]), "at least two parents, got 1"),
    "equal parents": (lambda: mixture(MLP, [MLP, MLP]), "linearly dependent"),
    "no weights": (lambda: mixture(MLP, [{}, {}]), "No weight has the same name"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_tells_nothing_is_refused(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        call()
