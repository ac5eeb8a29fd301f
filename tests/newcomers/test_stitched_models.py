"""What newcomers do with a stitched model: all that they do with any network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hf_stitch
from hf_stitch.adapters.doctor import diagnose

from server import turned_to_a_hub  # isort: skip
from tiny_networks import LAYERS, network  # isort: skip

LIKE = {"cnn": "images", "bert": "texts", "gpt2": "texts"}
"""Family of both networks -> the fixture with their samples."""


@pytest.mark.parametrize("family", LIKE)
def test_a_stitched_model_is_loaded_examined_compared_and_stitched_like_any_network(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    data = request.getfixturevalue(LIKE[family])[:40]
    few = [row["image" if family == "cnn" else "text"] for row in data[:3]]
    a, b, layer = network(family), network(family, 1), LAYERS[family]
    made = hf_stitch.stitch(a, b, data, source_layer=layer, target_layer=layer, progress=False)
    with turned_to_a_hub(tmp_path / "cache"):
        made.push_to_hub("alice/ab")
        made.save_pretrained(tmp_path / "ab")
        for place in (made, str(tmp_path / "ab"), "alice/ab"):
            adapter = hf_stitch.load(place)
            assert {f"source.{layer}", f"target.{layer}"} <= set(adapter.layers)
            assert (adapter.library, adapter.task) == ("hf_stitch", b.task)
            x = adapter.preprocess(few)
            assert torch.equal(adapter.forward(x).logits, made(**made.preprocess(few)).logits)
        assert adapter.reference.id == "alice/ab" and len(adapter.reference.revision or "") == 40
        found = diagnose("alice/ab")
        assert found.cuts == adapter.layers and not found.failed, found.error
        atlas = hf_stitch.compare("alice/ab", a, data, layers_a=[f"source.{layer}"], layers_b=[layer], progress=False)
        assert float(atlas.to_pandas()["value"].iloc[0]) == pytest.approx(1.0)  # the same network up to there
        chain = hf_stitch.stitch(
            a, "alice/ab", data, source_layer=layer, target_layer=f"source.{layer}", test_size=0.5, progress=False
        )
        chain.push_to_hub("alice/chain")
        again = hf_stitch.StitchedModel.from_pretrained("alice/chain")
        assert type(again) is type(made) and again.config.target["reference"]["id"] == "alice/ab"
        inputs = again.preprocess(few)
        assert torch.equal(again(**inputs).logits, chain(**inputs).logits)
        scores = hf_stitch.evaluate(again, data, progress=False)  # its parents come from the Hub
        assert scores.to_dict()["scores"]["stitched"]
