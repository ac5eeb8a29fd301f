"""What newcomers do with a stitched model: all that they do with any network."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import hf_stitch
import hf_stitch.auto
from hf_stitch.adapters import ExampleError
from hf_stitch.adapters.doctor import diagnose
from hf_stitch.cli import app

from server import turned_to_a_hub  # isort: skip
from tiny_networks import LAYERS, TEXT, network, plain_tokenizer  # isort: skip

LIKE = {"cnn": "images", "bert": "texts"}
"""Family of both networks -> the fixture with their samples."""


@pytest.mark.parametrize("family", ["cnn", "bert"])
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
            assert {f"source.{layer}", f"target.{layer}"} <= set(adapter.candidates)
            assert (adapter.library, adapter.task) == ("hf_stitch", b.task)
            assert torch.equal(adapter.forward(adapter.preprocess(few)).logits, made(**made.preprocess(few)).logits)
        assert adapter.reference.id == "alice/ab" and len(adapter.reference.revision or "") == 40
        found = diagnose("alice/ab")
        assert found.cuts == adapter.layers and not found.failed, found.error
        assert {f"source.{layer}", f"target.{layer}"} <= set(found.cuts)
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
        with pytest.warns(UserWarning, match="was fitted to 50.0% of these samples"):
            scores = hf_stitch.evaluate(again, data, progress=False)  # its target comes from the Hub
        assert scores.to_dict()["scores"]["stitched"]
        shown = CliRunner().invoke(app, ["doctor", "alice/chain"])
        assert shown.exit_code == 0 and f"target.target.{layer}" in shown.output.replace("\n", "")
        if b.task == "text-classification":
            (found,) = transformers.pipeline(b.task, model="alice/chain")(few[:1])
            assert found["label"] == again.config.id2label[again(**inputs).logits[0].argmax().item()]


# -- text encoders -----------------------------------------------------------------------------------------------------
def encoder(seed: int, width: int) -> hf_stitch.Adapter:
    torch.manual_seed(seed)
    config = transformers.BertConfig(**{**TEXT, "hidden_size": width}, max_position_embeddings=40 + width)
    return hf_stitch.load(transformers.BertModel(config).eval(), processor=plain_tokenizer())


@pytest.fixture(scope="module")
def encoders(texts: Any) -> tuple[hf_stitch.Adapter, hf_stitch.Adapter, hf_stitch.StitchedModel, list[str]]:
    a, b, words = encoder(0, 32), encoder(1, 48), [row["text"] for row in texts]
    layers = {"source_layer": "encoder.layer.1", "target_layer": "encoder.layer.0"}
    return a, b, hf_stitch.stitch(a, b, words, **layers, progress=False), words


def test_the_files_of_a_stitched_encoder_are_usual_and_name_the_import_they_need(encoders: Any, tmp_path: Path) -> None:
    a, b, made, _ = encoders
    made.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.hidden_size == b.model.config.hidden_size == 48
    assert config.max_position_embeddings == a.model.config.max_position_embeddings == 72  # the shorter of both
    assert (config.vocab_size, config.pad_token_id) == (80, 0) and "usage" not in config.to_dict()
    with pytest.warns(UserWarning, match="longer than the 72 tokens"):
        assert made.preprocess(["w1 " * 80])["input_ids"].shape == (1, 72)
    assert "import hf_stitch before" in (tmp_path / "config.json").read_text().splitlines()[1]
    assert "After `import hf_stitch`, Auto classes" in (tmp_path / "README.md").read_text()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_stitch.StitchedModel.from_pretrained(tmp_path)


def test_a_stitched_model_is_loaded_from_a_subfolder(encoders: Any, tmp_path: Path) -> None:
    _, _, made, words = encoders
    place, inputs = tmp_path / "ab" / "deep" / "er", made.preprocess(words[:3])
    made.save_pretrained(place)
    made.stitcher.save_pretrained(tmp_path / "stitcher" / "below")
    hf_stitch.Stitcher.from_pretrained(tmp_path / "stitcher", subfolder="below")
    again = [transformers.AutoModel.from_pretrained(tmp_path / "ab", subfolder="deep/er")]
    with turned_to_a_hub(tmp_path / "cache") as server:
        server.put("alice/ab", {f"deep/er/{file.name}": file.read_bytes() for file in place.iterdir()})
        again += [hf_stitch.StitchedModel.from_pretrained("alice/ab", subfolder="deep/er")]
        found = hf_stitch.load("alice/ab", subfolder="deep/er")
        assert found.reference.revision == server.models["alice/ab"].resolve("main")
        again += [found.model]
    with torch.no_grad():
        expected = made(**inputs).last_hidden_state
        assert all(torch.equal(model(**inputs).last_hidden_state, expected) for model in again)
    with pytest.raises(FileNotFoundError, match="does not have a subfolder 'else'"):
        hf_stitch.StitchedModel.from_pretrained(tmp_path / "ab", subfolder="else")


def test_a_sentence_transformer_is_a_target(encoders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    modules = pytest.importorskip("sentence_transformers.models")
    a, b, _, words = encoders
    a.model.save_pretrained(tmp_path)
    a.processor.save_pretrained(tmp_path)
    whole = library.SentenceTransformer(str(tmp_path), device="cpu")
    whole.append(modules.Dense(32, 16))
    whole.append(modules.Normalize())
    layers = {"source_layer": "encoder.layer.1", "target_layer": "0.model.encoder.layer.1"}
    made = hf_stitch.stitch(b, whole, words, **layers, progress=False)
    inputs = made.preprocess(words[:5])
    torch.testing.assert_close(made(**inputs).norm(dim=-1), torch.ones(5))  # its pooling and normalisation belong to it
    made.stitcher.save_pretrained(tmp_path / "stitcher")
    again = hf_stitch.Stitcher.from_pretrained(tmp_path / "stitcher")
    assert torch.equal(again.attach(b, whole)(**inputs), made(**inputs))
    others = [copy.deepcopy(whole) for _ in range(2)]
    others[0][1].pooling_mode = "cls"  # without weights
    del others[1][3]
    for other, message in zip(others, (r"1\.pooling_mode 'mean', now 'cls'", r"3\.class 'Normalize'"), strict=True):
        with pytest.raises(ValueError, match=message):
            again.attach(b, other)
    alone = r"or stitch only its transformer, load\(…, task='feature-extraction'\) or model\[0\]"
    with pytest.raises(ValueError, match=alone):
        made.save_pretrained(tmp_path / "whole")
    for kind in {kind for module in whole for kind in type(module).__mro__}:  # as if a version called it differently
        if "get_config_dict" in vars(kind):
            monkeypatch.delattr(kind, "get_config_dict")
    with pytest.raises(AttributeError, match="get_config_dict"):
        hf_stitch.load(whole).settings()


# -- networks of user code ---------------------------------------------------------------------------------------------
class Small(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        return self.head(self.second(hidden).relu())


@pytest.fixture(scope="module")
def of_user_code(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, nn.Module, torch.Tensor, Path]:
    torch.manual_seed(0)
    data, nets = torch.randn(60, 4), (Small(20), Small(32))
    a, b = (hf_stitch.load(net, example_inputs=data[:2]) for net in nets)
    made = hf_stitch.stitch(a, b, data, source_layer="first", target_layer="first", task=None, progress=False)
    folder = tmp_path_factory.mktemp("user_code")
    made.stitcher.save_pretrained(folder)
    return *nets, data, folder


def test_networks_of_user_code_are_named_and_recognised(of_user_code: Any) -> None:
    a, b, data, folder = of_user_code
    stitcher, example = hf_stitch.Stitcher.from_pretrained(folder), {"example_inputs": data[:2]}
    names = [f"Small, 3 layers with weights, {count} parameters" for count in ("583", "1,315")]
    for name, end in zip(names, (stitcher.source, stitcher.target), strict=True):
        assert str(end) == f"{name}, {(end.weights_hash or '')[:15]}"
        assert name in (folder / "README.md").read_text() and name in repr(stitcher)
    adapters = [hf_stitch.load(net, **example) for net in (a, b)]
    how = r"load it with hf_stitch.load\(net, example_inputs=…, processor=…\) and pass the adapter"
    swapped = rf"the network passed as the source, {names[1]}.* is the recorded target; .* are swapped"
    twice = rf"passed as the target, {names[0]}.*recorded source; the recorded target is {names[1]}.* If "
    other = rf"the source {names[0]}.* has other weights than the stitch was fitted to"
    cuts = {"source_layer": "first", "target_layer": "first"}
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: stitcher.attach(a, b), ExampleError, how),
        (lambda: hf_stitch.stitch(a, b, data, **cuts), ExampleError, how),
        (lambda: hf_stitch.compare(a, b, data), ExampleError, how),
        (lambda: stitcher.attach(*adapters, **example), TypeError, "adapters already have example inputs"),
        (lambda: stitcher.attach(*adapters, token="x"), TypeError, "token: loading options require a network that is"),
        (lambda: hf_stitch.load(adapters[0], processor=len), TypeError, "keeps its loading options, got processor"),
        (lambda: stitcher.attach(), ValueError, rf"the source, {names[0]}, sha256:\w+, was a module in memory"),
        (lambda: stitcher.attach(b, a, **example), ValueError, swapped),
        (lambda: stitcher.attach(a, a, **example), ValueError, twice),
        (lambda: stitcher.attach(Small(20), b, **example), ValueError, other),
    ]
    for job, error, message in refused:
        with pytest.raises(error, match=message):
            job()


def test_modules_are_attached_as_the_card_says_and_with_their_example_inputs(of_user_code: Any) -> None:
    a, b, data, folder = of_user_code
    card = (folder / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1].replace("path/to/this/folder", str(folder))  # type: ignore[index]
    given = {"your_source": a, "your_target": b, "your_batch": data[:2], "your_transform": None, "your_sample": data[0]}
    exec(code, given)
    assert given["output"].shape == (1, 3)  # type: ignore[attr-defined]
    made = hf_stitch.Stitcher.from_pretrained(folder).attach(a, b, example_inputs=data[:2])
    maps: Any = made.stitch.body
    with torch.no_grad():
        expected = b.head(b.second((a.first(data) @ maps.weight.T + maps.bias).relu()).relu())
        torch.testing.assert_close(made(x=data), expected, rtol=1e-5, atol=1e-6)
