"""A folder with ``modules.json`` is a sentence encoder: its output is that of ``encode``, whatever its modules are."""

from __future__ import annotations

import copy
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_stitch
from hf_stitch.adapters import load_recorded
from hf_stitch.adapters.libraries import sentence_transformers as library_module

from tiny_networks import TEXT, WORDS, plain_tokenizer  # isort: skip

library = pytest.importorskip("sentence_transformers")
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding  # noqa: E402

SAMPLES = [" ".join(WORDS[place % 7 : place % 7 + 2 + place % 5]) for place in range(12)]
PROMPTS = {"query": "w1 w2 ", "document": "w9 "}
BERT = transformers.BertConfig(**TEXT)
LLAMA = transformers.LlamaConfig(**TEXT, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def network(folder: Path, seed: int = 0, config: Any = BERT, side: str = "right", **head: Any) -> Path:
    """Save a transformer and its tokenizer."""
    torch.manual_seed(seed)
    made = head.pop("kind", transformers.AutoModel).from_config(config)
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(3)
    made.save_pretrained(folder)
    tokenizer = plain_tokenizer()
    tokenizer.padding_side = side
    for name, value in head.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return folder


def encoder(*modules: Any, **options: Any) -> Any:
    return library.SentenceTransformer(modules=[*modules], device="cpu", **options)


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    def made(**options: Any) -> Any:
        return Transformer(str(network(tmp_path_factory.mktemp("body"), **options)))

    return made


@pytest.fixture(scope="module")
def folder(body: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved encoder with all that its output depends on."""
    made = encoder(
        body(), Pooling(32, "mean", include_prompt=False), Dense(32, 24), Normalize(),
        prompts=PROMPTS, default_prompt_name="query", truncate_dim=16, similarity_fn_name="dot",
    )  # fmt: skip
    place = tmp_path_factory.mktemp("saved") / "encoder"
    made.save(str(place))
    return place


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    """A copy of the saved encoder, which a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "encoder"))


def output(adapter: hf_stitch.Adapter, samples: list[str] = SAMPLES) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = adapter.forward(adapter.preprocess(samples))
    return found


def router(body: Any, **options: Any) -> Any:
    query, document = [body(seed=1), Pooling(32, "cls")], [body(seed=2), Pooling(32, "mean")]
    return Router.for_query_document(query, document, **options)


# -- outputs -----------------------------------------------------------------------------------------------------------
CASES: dict[str, Callable[[Any], Any]] = {
    "mean": lambda body: encoder(body(), Pooling(32, "mean"), Normalize(), truncate_dim=16),
    "default prompt": lambda body: encoder(
        body(), Pooling(32, "mean"), prompts=PROMPTS, default_prompt_name="query"
    ),
    "prompts without a default": lambda body: encoder(body(), Pooling(32, "mean"), prompts=PROMPTS),
    "prompt left out of the mean": lambda body: encoder(
        body(), Pooling(32, "mean", include_prompt=False), prompts=PROMPTS, default_prompt_name="query"
    ),
    "prompt left out, padded left": lambda body: encoder(
        body(config=LLAMA, side="left"), Pooling(32, "weightedmean", include_prompt=False), prompts=PROMPTS,
        default_prompt_name="query",
    ),
    "last token, padded left": lambda body: encoder(body(config=LLAMA, side="left"), Pooling(32, "lasttoken")),
    "two poolings": lambda body: encoder(body(), Pooling(32, ("mean", "max"))),
    "dense": lambda body: encoder(body(), Pooling(32, "cls"), Dense(32, 8)),
    "router": lambda body: encoder(router(body), Normalize(), prompts=PROMPTS),
    "router of queries": lambda body: encoder(
        router(body, default_route="query"), Normalize(), prompts=PROMPTS, default_prompt_name="query"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_output_is_that_of_encode_and_every_cut_is_exact(case: str, body: Any, tmp_path: Path) -> None:
    model = CASES[case](body)
    expected = model.encode(SAMPLES, convert_to_tensor=True)
    live = hf_stitch.load(model)
    torch.testing.assert_close(output(live), expected, atol=1e-6, rtol=1e-5)
    model.save(str(tmp_path / "saved"))
    adapter = hf_stitch.load(tmp_path / "saved")
    assert torch.equal(output(adapter), output(live))
    assert adapter.layers[-2:] == ("pooled", "embedding") and len(adapter.layers) == 5
    inputs = adapter.preprocess(SAMPLES)
    with torch.no_grad():
        representations = adapter.encode(inputs, adapter.layers)
        for layer, representation in representations.items():
            assert torch.equal(adapter.decode(representation, layer), adapter.forward(inputs))
        assert torch.equal(adapter.model(**inputs), adapter.forward(inputs))
    assert representations["embedding"].values.shape == expected.shape
    with torch.no_grad():  # one at a time, without padding
        alone = torch.cat([output(adapter, [sample]) for sample in SAMPLES])
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-4)


def test_a_prompt_that_the_pooling_leaves_out_is_that_of_both_sides(body: Any) -> None:
    source, target = (
        hf_stitch.load(
            encoder(
                body(seed=seed), Pooling(32, "mean", include_prompt=False), prompts=PROMPTS, default_prompt_name=name
            )
        )
        for seed, name in ((1, None), (2, "query"))
    )
    layers = {"source_layer": source.layers[0], "target_layer": target.layers[0], "progress": False}
    layers["matcher"] = "identity"
    with pytest.raises(ValueError, match=r"pooling of the target excludes its prompt, 'w1 w2 ', but the source has ''"):
        hf_stitch.stitch(source, target, SAMPLES, **layers)
    pooled = hf_stitch.stitch(source, target, SAMPLES, **layers, pooling="mean")
    with torch.no_grad():
        assert bool(pooled(**source.preprocess(SAMPLES)).any(1).all())  # the pooling leaves out no position


def test_the_route_and_the_prompt_of_queries_are_those_of_encode_query(body: Any) -> None:
    model = encoder(router(body), prompts=PROMPTS)
    model[0].default_route, model.default_prompt_name = "query", "query"
    adapter = hf_stitch.load(model)
    assert adapter.layers[0] == "0.sub_modules.query.0.model.encoder.layer.0"
    expected = model.encode_query(SAMPLES, convert_to_tensor=True)
    torch.testing.assert_close(output(adapter), expected, atol=1e-6, rtol=1e-5)
    model[0].default_route = None
    with pytest.raises(ValueError, match=r"Could not determine route .* setting a default route in the `Router`"):
        hf_stitch.load(model)


def test_tokens_of_the_prompt_belong_to_no_character_of_the_text(folder: Path) -> None:
    inputs = hf_stitch.load(folder).preprocess(["w3 w4", "w5"], offsets=True)
    assert inputs["offset_mapping"].tolist() == [[[0, 0], [0, 0], [0, 2], [3, 5]], [[0, 0], [0, 0], [0, 2], [0, 0]]]
    assert inputs["prompt_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]


def test_a_stitched_model_puts_the_prompt_of_its_source_before_texts(folder: Path, body: Any) -> None:
    source = hf_stitch.load(folder)
    layer = "0.model.encoder.layer.1"
    target = hf_stitch.load(encoder(body(), Pooling(32, "mean"), prompts={"p": "w1 w2 "}, default_prompt_name="p"))
    made = hf_stitch.stitch(
        source, target, SAMPLES, source_layer=layer, target_layer=layer, matcher="identity", progress=False
    )
    assert torch.equal(made.preprocess(["w3"])["input_ids"], source.preprocess(["w3"])["input_ids"])
    with torch.no_grad():
        torch.testing.assert_close(made(**made.preprocess(SAMPLES)), output(target))  # of the same transformer


# -- what is loaded ----------------------------------------------------------------------------------------------------
def test_a_folder_opens_no_socket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert output(hf_stitch.load(folder)).shape == (12, 16)


def test_a_record_loads_the_same_thing_again(folder: Path) -> None:
    whole = hf_stitch.load(folder, default_prompt_name="document", truncate_dim=8, dtype="float64")
    assert whole.reference.library == "sentence_transformers"
    again = load_recorded(hf_stitch.ModelReference.from_dict(whole.pinned.to_dict()))
    assert torch.equal(output(again), output(whole)) and output(again).shape == (12, 8)
    assert whole.pinned.changes(again.pinned) == {}
    network = hf_stitch.load(folder, task="feature-extraction")
    assert type(network.model) is transformers.BertModel
    assert (network.reference.library, network.reference.task) == ("transformers", "feature-extraction")
    assert type(load_recorded(network.reference).model) is transformers.BertModel
    before = hf_stitch.ModelReference(str(folder), "transformers")  # as version 0.2 recorded it
    assert type(load_recorded(before).model) is transformers.BertModel


def test_prompt_width_and_the_settings_of_both_routes_are_pinned(folder: Path, body: Any) -> None:
    changed = hf_stitch.load(folder, default_prompt_name="document", truncate_dim=8)
    differences = hf_stitch.load(folder).pinned.changes(changed.pinned)
    assert differences == {"config": ["prompt 'w1 w2 ', now 'w9 '", "truncate_dim 16, now 8"]}
    model = encoder(router(body))
    other = copy.deepcopy(model)
    other[0].sub_modules["query"][1].pooling_mode = "max"  # of the route that encode does not take
    (differences,) = hf_stitch.load(model).pinned.changes(hf_stitch.load(other).pinned).values()
    assert "0.query.1.pooling_mode 'cls', now 'max'" in differences


def test_an_encoder_without_its_training(folder: Path) -> None:
    with pytest.raises(TypeError, match="no_such_option"):
        hf_stitch.load(folder, no_such_option=1)
    whole, random = hf_stitch.load(folder), hf_stitch.load(folder, pretrained=False)
    assert random.layers == whole.layers
    assert not torch.equal(output(random), output(whole))
    plan = hf_stitch.plan(hf_stitch.compare, str(folder), str(folder), SAMPLES, metrics=["linear_cka"])
    assert "5 × 5 layers" in str(plan)


def test_the_transformer_may_be_in_a_folder_of_its_own(folder: Path, place: Path) -> None:
    """The layout of older versions."""
    (place / "0_Transformer").mkdir()
    modules = json.loads((place / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (place / "modules.json").write_text(json.dumps(modules))
    for file in [*place.glob("*.json"), *place.glob("*.safetensors")]:
        if file.name not in ("modules.json", "config_sentence_transformers.json"):
            file.rename(place / "0_Transformer" / file.name)
    assert torch.equal(output(hf_stitch.load(place)), output(hf_stitch.load(folder)))
    assert type(hf_stitch.load(place, subfolder="0_Transformer").model) is transformers.BertModel


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "found"), [("find_spec", None), ("version", "5.1.0")])
def test_the_library_is_required(name: str, found: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, name, lambda _: found)
    with pytest.raises(ImportError, match=r"sentence-transformers>=6.* its transformer, with task='feature"):
        hf_stitch.load(folder)
    assert type(hf_stitch.load(folder, task="feature-extraction").model) is transformers.BertModel


def test_code_of_others_runs_only_if_it_is_trusted(folder: Path, place: Path, tmp_path: Path) -> None:
    modules = json.loads((place / "modules.json").read_text())
    modules.append({"idx": 4, "name": "4", "path": "4_Other", "type": "modeling_other.Other"})
    (place / "modules.json").write_text(json.dumps(modules))
    (place / "modeling_other.py").write_text(
        f"import pathlib, torch\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n\n"
        "class Other(torch.nn.Module):\n"
        "    def forward(self, features, **_):\n"
        "        return features | {'sentence_embedding': -features['sentence_embedding']}\n\n"
        "    @classmethod\n    def load(cls, path):\n        return cls()\n"
    )
    (place / "4_Other").mkdir()
    with pytest.raises(ValueError, match=r"(?s)modeling_other.Other.*trust_remote_code=True"):
        hf_stitch.load(place)
    with pytest.raises(ValueError, match="trust_remote_code=True"):  # a record gives no trust
        load_recorded(hf_stitch.ModelReference(str(place), "sentence_transformers"))
    assert not (tmp_path / "ran").exists()
    assert torch.equal(output(hf_stitch.load(place, trust_remote_code=True)), -output(hf_stitch.load(folder)))


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("modules.json", r"does not contain modules.json: copy all of its files, or load only its transformer"),
        ("1_Pooling", r"lacks files of its modules \(.*embedding_dimension.*\): copy all files, or load"),
        ("2_Dense", r"lacks files of its modules \(.*in_features.*\): copy all files, or load"),
        ("model.safetensors", r"model.safetensors"),
        ("2_Dense/model.safetensors", r"Could not find 'model.safetensors'"),
    ],
)
def test_an_incomplete_copy_is_refused(lost: str, message: str, place: Path) -> None:
    shutil.rmtree(place / lost) if (place / lost).is_dir() else (place / lost).unlink()
    with pytest.raises((ValueError, OSError), match=message):
        hf_stitch.load(place)


def test_a_cross_encoder_is_a_network_with_a_head(tmp_path: Path) -> None:
    config = transformers.BertConfig(**TEXT, num_labels=1)
    kind = transformers.AutoModelForSequenceClassification
    model = library.CrossEncoder(str(network(tmp_path / "network", config=config, kind=kind)), device="cpu")
    model.save_pretrained(str(tmp_path / "saved"))
    adapter = hf_stitch.load(tmp_path / "saved")
    assert (adapter.library, adapter.task) == ("transformers", "regression")
    pairs = list(zip(SAMPLES, reversed(SAMPLES), strict=True))
    with torch.no_grad():
        scores = adapter.forward(adapter.preprocess(pairs)).logits[:, 0]
    expected = model.predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True)
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-5)
    assert type(load_recorded(adapter.reference).model) is transformers.BertForSequenceClassification


def test_other_kinds_of_models_are_refused_by_name(tmp_path: Path) -> None:
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    place = network(tmp_path / "network", kind=transformers.AutoModelForMaskedLM)
    first = Transformer(str(place), transformer_task="fill-mask")
    library.SparseEncoder(modules=[first, SpladePooling("max")], device="cpu").save_pretrained(str(tmp_path / "sparse"))
    with pytest.raises(ValueError, match=r"is an unsupported SparseEncoder, or load .* the task of its head"):
        hf_stitch.load(tmp_path / "sparse")
    assert hf_stitch.load(tmp_path / "sparse", task="fill-mask").task == "fill-mask"
    encoder(StaticEmbedding(plain_tokenizer().backend_tokenizer, embedding_dim=8)).save(str(tmp_path / "static"))
    with pytest.raises(ValueError, match=r"must begin with a transformer for texts.*got StaticEmbedding"):
        hf_stitch.load(tmp_path / "static")


def test_a_chat_template_is_refused_by_name(tmp_path: Path) -> None:
    template = "{% for message in messages %}w5 {{ message['content'] }}{% endfor %}"
    place = network(tmp_path, config=LLAMA, side="left", chat_template=template)
    model = encoder(Transformer(str(place)), Pooling(32, "lasttoken"))
    with pytest.raises(ValueError, match=r"different tokens for a text \(as mess.* pass the tokenizer as processor="):
        hf_stitch.load(model)
    assert hf_stitch.load(model, processor=model.tokenizer).layers[-1] == "embedding"


def test_weights_that_the_folder_lacks_are_not_drawn(folder: Path, place: Path) -> None:
    """A pooler that no pooling reads is left out, so that two loads are one network; other weights are refused."""
    from safetensors.torch import load_file, save_file

    weights = load_file(place / "model.safetensors")
    whole = {name: value for name, value in weights.items() if not name.startswith("pooler.")}
    save_file(whole, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="does not contain weights of the pooler"):
        first, second = hf_stitch.load(place), hf_stitch.load(place)
    assert first.pinned.weights_hash == second.pinned.weights_hash
    assert torch.equal(output(first), output(hf_stitch.load(folder)))
    del whole["encoder.layer.1.output.dense.weight"]
    save_file(whole, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights of BertModel.*encoder.layer.1.output.dense.weight"):
        hf_stitch.load(place)
