"""The covariance of patches gives the inner products of outputs."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from atom_networks import pair, plain, weight_cosines
from hf_stitch_filter_atoms import PatchCosine, PatchCovariance, atomize
from timm.layers import Conv2dSame
from torch import nn

from hf_stitch import compare, registries
from hf_stitch.metrics import NotComparable


def cosines(path: str, *nets: nn.Module) -> dict[str, float]:
    metric = PatchCosine(covariance=path)
    a, b = (metric.read(net) for net in nets)
    return {layer: metric.value(a[layer], b[layer]) for layer in a}


@pytest.mark.parametrize(("base", "out", "kernel", "options"), [
    (nn.Conv2d, 6, 3, {}), (nn.Conv2d, 6, 1, {}), (nn.Conv2d, 6, (3, 5), {"padding": "same", "dilation": 2}),
    (nn.Conv2d, 8, 3, {"groups": 2, "stride": 2, "padding": 1}), (nn.Conv2d, 4, 3, {"groups": 4}),
    (nn.Conv2d, 6, 3, {"padding": 2, "padding_mode": "reflect"}), (nn.Conv2d, 6, (4, 3), {"padding": "same"}),
    (Conv2dSame, 6, 3, {"stride": 2}),
], ids=str)  # fmt: skip
def test_it_is_the_cosine_of_outputs(base, out, kernel, options, tmp_path) -> None:
    torch.manual_seed(0)
    a, b = (nn.Sequential(base(4, out, kernel, bias=False, **options)) for _ in "ab")
    x = torch.randn(5, 4, 11, 9).relu()
    PatchCovariance.of(a, [x[:2], (x[2:], "labels")]).save(tmp_path / "c")
    outputs = torch.cosine_similarity(a(x).flatten().double(), b(x).flatten().double(), 0).item()
    assert cosines(str(tmp_path / "c"), a, b)["0"] == pytest.approx(outputs, abs=1e-5)
    atomize(a)
    assert cosines(str(tmp_path / "c"), a, b)["0"] == pytest.approx(outputs, abs=1e-5)


def test_the_identity_gives_the_cosine_of_weights(tmp_path) -> None:
    a, b = plain(0), plain(1)
    measured = PatchCovariance.of(a, [torch.randn(2, 3, 12, 12)])
    eyes = {name: torch.eye(f.shape[1]).expand_as(f).contiguous() for name, f in measured.factors.items()}
    PatchCovariance(eyes).save(tmp_path / "c")
    assert cosines(str(tmp_path / "c"), a, b) == pytest.approx(weight_cosines(a, b), abs=1e-12)


def test_measuring_changes_nothing_and_batches_add_up() -> None:
    net = plain().train()
    state = copy.deepcopy(net.state_dict())
    x = torch.randn(6, 3, 12, 12)
    measured = PatchCovariance.of(net, x.split(2))
    assert net.training and all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    at_once = PatchCovariance.of(net, [x])
    for name, factor in measured.factors.items():
        torch.testing.assert_close(factor, at_once.factors[name], atol=1e-4, rtol=1e-3)
    patches = F.unfold(F.pad(x, (1, 1, 1, 1)), 3).transpose(1, 2).flatten(0, 1).double()
    factor = measured.factors["0"][0].double()
    torch.testing.assert_close(factor @ factor.T, patches.T @ patches / len(patches), atol=1e-5, rtol=1e-5)


class ByName(nn.Module):
    """A network that takes its input by name, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self.conv(pixel_values)


def test_batches() -> None:
    net, x = ByName(), torch.randn(4, 2, 6, 6)
    batches = [x, [x], (x, "labels"), {"pixel_values": x}, {"pixel_values": x, "labels": torch.zeros(4)}]
    assert len({PatchCovariance.of(net, [batch]).key for batch in batches}) == 1
    for batch in ("images", [], None, ["images"], 3):
        with pytest.raises(
            TypeError, match="a batch must be a tensor, a sequence starting with a tensor, or a mapping"
        ):
            PatchCovariance.of(net, [batch])


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_inputs_that_are_not_finite_are_refused(number: float) -> None:
    net = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3))
    x = torch.randn(2, 2, 8, 8)
    x[0, 0, 0, 0] = number
    with pytest.raises(ValueError, match="the inputs of layer '0' contain NaN or infinity"):
        PatchCovariance.of(net, [x])
    with torch.no_grad():
        net[0].weight[0, 0, 0, 0] = number
    with pytest.raises(ValueError, match="the inputs of layer '1' contain NaN or infinity"):
        PatchCovariance.of(net, [torch.randn(2, 2, 8, 8)])


def test_the_recipe_has_the_key_of_what_the_file_contains(tmp_path: Path) -> None:
    a, b = pair()
    path = tmp_path / "c.safetensors"
    measured = PatchCovariance.of(a, [torch.randn(2, 3, 12, 12)])
    measured.save(path)
    atlas = compare(a, b, metrics=[PatchCosine(covariance=path)])
    label = f"patch_cosine(covariance={path})"
    assert list(atlas.values) == [label]
    record = json.loads(json.dumps(atlas.recipe))["metrics"][label]
    assert record == {"name": "patch_cosine", "options": {"covariance": str(path), "key": measured.key}}
    again = registries.metrics.build(record["name"], **record["options"])
    np.testing.assert_array_equal(compare(a, b, metrics=[again])[label], atlas[label])
    other = PatchCovariance.of(a, [torch.randn(2, 3, 12, 12)])
    other.save(path)
    for metric in (registries.metrics.build(record["name"], **record["options"]), again):
        with pytest.raises(ValueError, match=f"must contain the patch covariance {measured.key}, got {other.key}"):
            metric.read(a)
    for wrong in (None, 3):
        with pytest.raises(TypeError, match=f"covariance must be a text or a path, got {wrong}"):
            PatchCosine(covariance=wrong)


def test_silent_inputs_have_no_value(tmp_path) -> None:
    net = nn.Sequential(nn.Conv2d(2, 2, 3))
    PatchCovariance.of(net, [torch.zeros(1, 2, 5, 5)]).save(tmp_path / "c")
    with pytest.raises(NotComparable, match="zero"):
        cosines(str(tmp_path / "c"), net, net)
    x = torch.randn(3, 2, 5, 5)
    x[:, 1] = 0  # one silent channel
    PatchCovariance.of(net, [x]).save(tmp_path / "d")
    assert cosines(str(tmp_path / "d"), net, net)["0"] == pytest.approx(1)


def test_files(tmp_path) -> None:
    a, _ = pair()
    measured = PatchCovariance.of(a, [torch.randn(2, 3, 12, 12)])
    path = tmp_path / "c.safetensors"
    measured.save(path)
    again = PatchCovariance.load(path)
    assert again.key == measured.key and list(again.factors) == list(measured.factors) == ["0", "3", "5"]
    PatchCovariance.of(a, [torch.randn(2, 3, 12, 12)]).save(tmp_path / "other")
    first, second = (PatchCosine(covariance=str(p)).read(a)["0"] for p in (path, tmp_path / "other"))
    with pytest.raises(NotComparable, match="the patch covariances differ"):
        PatchCosine(covariance=str(path)).value(first, second)
    with pytest.raises(ValueError, match="requires covariance=, a file"):
        PatchCosine().read(a)
    with pytest.raises(FileNotFoundError, match=r"does not exist; PatchCovariance.save"):
        PatchCosine(covariance=str(tmp_path / "missing")).read(a)
    with pytest.raises(
        ValueError, match=r"the covariance of layer '0' must have shape \(1, 75, 75\), got \(1, 27, 27\)"
    ):
        PatchCosine(covariance=str(path)).read(nn.Sequential(nn.Conv2d(3, 8, 5)))
    with pytest.raises(ValueError, match="the covariance lacks layer '1'"):
        PatchCosine(covariance=str(path)).read(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 5)))
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "weights")
    with pytest.raises(ValueError, match=r"must be a file from PatchCovariance.save"):
        PatchCovariance.load(tmp_path / "weights")
    for data, net in (([], a), ([torch.zeros(2, 2)], nn.Linear(2, 2))):
        with pytest.raises(ValueError, match="no patches"):
            PatchCovariance.of(net, data)
