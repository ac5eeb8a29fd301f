"""Networks with atoms are recorded as rewritten, and stitched models with them are saved and loaded."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from atom_networks import plain
from hf_stitch_filter_atoms import AtomConv2d, FilterAtomsRewrite, atomize, deatomize

import hf_stitch
from hf_stitch import registries
from hf_stitch.adapters.rewriting import rewrite, rewrites_of


def test_registered_by_name() -> None:
    assert registries.rewrites.get("filter_atoms") is FilterAtomsRewrite
    assert registries.rewrites.build("filter_atoms").to_dict() == {
        "name": "filter_atoms",
        "atoms": None,
        "layers": None,
    }


def test_atomizing_is_recorded_and_repeated() -> None:
    net = plain()
    atomize(net, atoms=4, layers=["3"])
    atomize(net, layers=["0", "5"])
    assert rewrites_of(net) == [
        {"name": "filter_atoms", "atoms": 4, "layers": ["3"]},
        {"name": "filter_atoms", "atoms": None, "layers": ["0", "5"]},
    ]
    assert rewrites_of(copy.deepcopy(net)) == rewrites_of(net)
    other = plain(1)
    for record in rewrites_of(net):
        rewrite(other, record)
    other.load_state_dict(net.state_dict(), strict=True)
    x = torch.randn(2, 3, 12, 12)
    assert torch.equal(other(x), net(x))
    deatomize(net)
    assert rewrites_of(net) == []


def test_values_do_not_matter_to_the_skeleton() -> None:
    net = plain()
    with torch.no_grad():
        net[0].weight.fill_(torch.nan)
    rewrite(net, FilterAtomsRewrite(atoms=2))
    assert isinstance(net[0], AtomConv2d) and net[0].atoms.shape == (2, 3, 3)


def test_a_failed_rewrite_is_not_recorded() -> None:
    net = plain()
    with pytest.raises(ValueError, match="layer 'conv' does not exist"):
        atomize(net, layers=["conv"])
    assert rewrites_of(net) == []


def test_a_stitched_model_with_an_atomized_half(tmp_path) -> None:
    torch.manual_seed(0)
    front, end = (timm.create_model("test_resnet", num_classes=4).eval() for _ in range(2))
    atomize(front, atoms=6)
    x = torch.randn(8, 3, 160, 160)
    stitched = hf_stitch.stitch(front, end, x, source_layer="layer2", target_layer="layer2", task=None, progress=False)
    wanted = stitched(x)
    stitched.save_pretrained(tmp_path)
    loaded = type(stitched).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(x), wanted)


def test_a_part_has_its_own_record(tmp_path) -> None:
    """Atomizing a part of a network is not recorded on the network, so that a stitched model cannot be saved."""
    net, other = (timm.create_model("test_resnet", num_classes=4).eval() for _ in range(2))
    atomize(net.layer1)
    assert rewrites_of(net) == [] and len(rewrites_of(net.layer1)) == 1
    x = torch.randn(8, 3, 160, 160)
    stitched = hf_stitch.stitch(net, other, x, source_layer="layer2", target_layer="layer2", task=None, progress=False)
    with pytest.raises(ValueError, match="this model cannot be saved, because its networks differ"):
        stitched.save_pretrained(tmp_path)


def test_writing_into_the_computed_weight_has_no_effect() -> None:
    net = plain()
    atomize(net)
    before = copy.deepcopy(net.state_dict())
    torch.nn.init.zeros_(net[0].weight)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
