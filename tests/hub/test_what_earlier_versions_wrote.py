"""Everything that earlier versions wrote loads: models, stitchers, files and results, with the same values.

``make_fixtures.py`` wrote the fixtures. A version that lacks one of them is left out of its test.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fixture_models import PROMPT, generated, output_of
from fixture_networks import EXACT, FIXTURES, SENTENCES, networks
from hf_stitch_embeddings import Ageing, Calibration, EmbeddingMap, PairsCurve, RetrievalResult, Upgraded, Verdict
from hf_stitch_filter_atoms import PatchCovariance
from hf_stitch_studies import Bench, Curves, ModeConnectivity, Trajectory
from hf_stitch_transfer import SparseAutoencoder
from safetensors.torch import load_file
from torch import Tensor

import hf_stitch.auto  # noqa: F401
from hf_stitch import Activations, Samples, StitchedModel, Stitcher, analysis, load, load_report, swap, training
from hf_stitch.adapters.doctor import Diagnosis
from hf_stitch.analysis.comparison.asking import ROWS_OF
from hf_stitch.artefacts import Description, Head
from hf_stitch.artefacts.parents import warn_if_only_weights_are_pinned
from hf_stitch.relative import AnchorSet
from hf_stitch.results import Result
from hf_stitch.stitches import Stitch

from records import rewrite  # isort: skip

IMAGES = ("inverse", "model", "model_of_timm", "relative", "rewritten", "swapped")
TEXTS = ("language_chain", "language_model", "language_model_of_an_encoder", "two_tokenizers")
LOADERS: dict[str, list[Any]] = {
    "encoder": [StitchedModel],
    "text_classifier": [StitchedModel, transformers.AutoModelForSequenceClassification],
    **{name: [StitchedModel, transformers.AutoModelForImageClassification] for name in IMAGES},
    **{name: [StitchedModel, transformers.AutoModelForCausalLM] for name in TEXTS},
}
"""Folder of a stitched model -> classes that load it."""

ENDS = {
    "chain_stitcher": ("language_model", "parents/gpt2_2"),
    "language_stitcher": ("parents/gpt2", "parents/llama"),
    "relative_stitcher": ("parents/vit", "head"),
    "two_tokenizers_stitcher": ("parents/llama_fine", "parents/gpt2_coarse"),
}
"""Folder of a stitcher -> folders of its networks."""

DECODERS = {name for name in (*LOADERS, *ENDS) if name.startswith(("language", "chain", "two"))}

WRITTEN = "6eaad74b97b5c37b6f8d66026c91a5ff1abe3d65fa4f5d8e007b7ad8cbe7dec9"
"""SHA-256 of the names and hashes of all files of 0.2.0."""

KINDS: dict[str, type[Result]] = {
    kind.__name__: kind
    for kind in (
        analysis.Audit, analysis.ComparisonPlan, analysis.ConfidenceInterval, analysis.Detection, analysis.Evaluation,
        analysis.Identification, analysis.NetworkAtlas, analysis.PermutationTestResult, analysis.Plan,
        analysis.SimilarityAtlas, analysis.StitchGrid, training.Dynamics, training.History, Diagnosis, Ageing,
        Calibration, PairsCurve, RetrievalResult, Upgraded, Verdict, Bench, Curves, ModeConnectivity, Trajectory,
    )
}  # fmt: skip


def written(*names: str) -> pytest.MarkDecorator:
    """Run a test for the folders or files with these names, of all versions that wrote them."""
    found = [path for version in sorted(FIXTURES.iterdir()) for name in names if (path := version / name).exists()]
    return pytest.mark.parametrize("path", found, ids=[f"{path.parent.name}-{path.name}" for path in found])


def answer(path: Path) -> dict[str, Tensor]:
    """Read the values that belong to an artefact; outputs are those of float64.

    Those of float32 depend on the processor: by 1e-6, and by .2 where a stitch of 0.2.0 has weights of 235,602.
    """
    exact = load_file(EXACT).get(f"{path.parent.name}/{path.name}")
    return load_file(f"{path}.answer.safetensors") | ({} if exact is None else {"output": exact})


def close(found: Any, expected: Tensor) -> None:
    """Compare values: in float64 up to its rounding, which the stitches of 0.2.0 multiply, too."""
    rtol, atol = (1e-9, 1e-9) if expected.dtype == torch.float64 else (1e-5, 1e-6)
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=rtol, atol=atol)


def inputs(values: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the inputs among the values of a model, those that are no integers in a dtype."""
    found = {name: value for name, value in values.items() if name not in ("output", "prompt", "generated", "logits")}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}


@torch.no_grad()
def check_outputs(model: Any, expected: dict[str, Tensor]) -> None:
    """Compare the output of a model with that in its fixture, in the dtype of the latter."""
    output: Tensor = expected["output"]
    close(output_of(model.to(output.dtype)(**inputs(expected, output.dtype))), output)


@torch.no_grad()
def check_generation(model: Any, expected: dict[str, Tensor]) -> None:
    """Compare the greedily generated tokens and their logits with those in the fixture."""
    found = generated(model, expected["prompt"])
    assert found["generated"].tolist() == expected["generated"].tolist()
    close(found["logits"], expected["logits"])


# -- models and stitchers ----------------------------------------------------------------------------------------------
def loaded(path: Path, loader: Any = StitchedModel) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*contains unknown keys")
        return loader.from_pretrained(path)


def attached(path: Path) -> StitchedModel:
    source, target = (load(str(path.parent / name)) for name in ENDS[path.name])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*contains unknown keys")
        return Stitcher.from_pretrained(path).attach(source, target)


def test_the_files_are_those_that_were_written() -> None:
    files = sorted(each for each in (FIXTURES / "0.2.0").rglob("*") if each.is_file())
    lines = (
        f"{each.relative_to(FIXTURES).as_posix()} {hashlib.sha256(each.read_bytes()).hexdigest()}" for each in files
    )
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == WRITTEN


@written(*LOADERS)
def test_a_model_has_the_same_weights_and_outputs(path: Path) -> None:
    saved, expected = load_file(path / "model.safetensors"), answer(path)
    for loader in LOADERS[path.name]:
        model = loaded(path, loader)
        weights = model.state_dict()
        assert saved.keys() <= weights.keys()
        assert all(torch.equal(weights[name], value) for name, value in saved.items())
        if path.name in DECODERS:  # its tokenizer was saved with it
            two = path.name.startswith("two")
            prompt = "the walker is" if two else PROMPT
            assert model.preprocess([prompt])["input_ids"].tolist() == expected["prompt"].tolist()
            assert not two or model.preprocess(SENTENCES[:3])["input_ids"].tolist() == expected["input_ids"].tolist()
            check_generation(model, expected)
        check_outputs(model, expected)


@written(*ENDS)
def test_an_attached_stitcher_has_the_same_outputs(path: Path) -> None:
    model, expected = attached(path), answer(path)
    if path.name in DECODERS:
        check_generation(model, expected)
    check_outputs(model, expected)


@written("stitcher")
def test_a_stitcher_of_user_code_warns_once_that_only_weights_are_pinned(path: Path) -> None:
    expected = answer(path)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        stitcher = Stitcher.from_pretrained(path)
        warn_if_only_weights_are_pinned.cache_clear()
        with pytest.warns(UserWarning, match="only the weights of its networks are checked"):
            stitcher.attach(*networks())
        close(stitcher.attach(*networks())(input=expected["input"]), expected["output"])  # warns no more


@written("relative")
def test_the_encoder_of_a_relative_model_can_still_be_swapped(path: Path) -> None:
    """Its anchors were saved with it, so that no samples are needed."""
    encoder = str(path.parent / "parents" / "vit_1")
    found = swap(loaded(path), encoder=encoder, encoder_layer="vit.layers.1", pooling="cls", progress=False)
    check_outputs(found, answer(path.with_name("swapped")))


@written("head")
def test_a_head_has_the_same_outputs(path: Path) -> None:
    check_outputs(Head.from_pretrained(path), answer(path))


@written(*sorted(set(LOADERS) - {"encoder", "relative", "swapped", "inverse"}))
def test_scores_are_read(path: Path) -> None:
    scores = set(Description.read(path).scores["scores"])
    assert "stitched" in scores
    assert path.name != "model" or scores == {"stitched", "identity", "mean_only", "target", "chance"}


# -- what a newer version writes ---------------------------------------------------------------------------------------
FUTURE: dict[str, tuple[str, list[tuple[str, ...]]]] = {
    "stitcher": ("stitcher.json", [(), ("stitch",), ("stitch", "source"), ("target", "reference")]),
    "model": (
        "config.json",
        [(), ("source",), ("target", "plan"), ("target", "cut"), ("source", "interface"), ("source", "cut", "spec")],
    ),
}
"""Artefact -> its record, and places in the record where a newer version may add keys."""


@written(*FUTURE)
def test_keys_of_a_newer_version_are_named(path: Path, tmp_path: Path) -> None:
    """Except options of a map, which could change the output."""
    record, ways = FUTURE[path.name]
    folder = Path(shutil.copytree(path, tmp_path / path.name))

    def add(values: dict[str, Any]) -> None:
        for number, way in enumerate(ways):
            holder = values
            for key in way:
                holder = holder[key]
            holder[f"of_the_future_{number}"] = 1

    rewrite(folder / record, add)
    for loader in LOADERS.get(path.name, [Stitcher]):
        with pytest.warns(UserWarning, match="contains unknown keys") as warned:
            loader.from_pretrained(folder)
        told = " ".join(str(each.message) for each in warned)
        assert [number for number in range(len(ways)) if f"of_the_future_{number}" not in told] == []
    rewrite(folder / record, lambda record: record["stitch"]["body"].update(of_the_future=1))
    with pytest.raises(ValueError, match=r"was written by another version .*of_the_future"):
        LOADERS.get(path.name, [Stitcher])[0].from_pretrained(folder)


# -- files -------------------------------------------------------------------------------------------------------------
def stitches(path: Path, given: Any) -> dict[str, Any]:
    read = {file.stem: Stitch.load(file) for file in path.iterdir()}
    assert all((each.name, each.fitted) == (name, {"samples": 10, "ridge": 0.5}) for name, each in read.items())
    return {name: stitch.eval()(given["input"]) for name, stitch in read.items()}


def autoencoder(path: Path, given: Any) -> dict[str, Any]:
    made = SparseAutoencoder.from_saelens(path)
    assert made.metadata["hook_name"] == "blocks.3"
    return {"features": made.encode(given["input"]), "output": made(given["input"])}


def embedding_map(path: Path, given: Any) -> dict[str, Any]:
    found, adjoint = EmbeddingMap.from_pretrained(path), path.name == "adjoint_map"
    assert (found.direction, found.metric, found.normalized) == ("adjoint" if adjoint else "index", "cosine", True)
    assert adjoint or found.scores["report"]["recall"]
    return {"output": found(given["input"])}


READ: dict[str, Callable[[Path, Any], Mapping[str, Any]]] = {
    "stitches": stitches,
    "autoencoder": autoencoder,
    "embedding_map": embedding_map,
    "adjoint_map": embedding_map,
    "patch_covariance.safetensors": lambda path, _: PatchCovariance.load(path).factors,
}
"""File or folder -> what it contains, or what it computes from the input in its answer."""


@written(*READ)
@torch.no_grad()
def test_a_file_has_the_same_values(path: Path) -> None:
    expected = answer(path)
    found = READ[path.name](path, expected)
    assert found.keys() == expected.keys() - {"input"}
    for name, values in found.items():
        close(values, expected[name])


@written("anchors")
def test_anchors_are_the_same(path: Path) -> None:
    found, expected = AnchorSet.from_pretrained(path), answer(path)
    assert [(each.layer, each.pooling) for each in found.encoded] == [
        ("vit.layers.1", "mean"), ("vit.layers.1", "cls"), ("vit.layers.1", "cls"),
    ]  # fmt: skip
    for place, each in enumerate(found.encoded):
        close(each.values, expected[f"values.{place}"])
    assert found.among(Samples.of(list(expected["images"]))) == expected["among"].tolist() == list(range(12))
    close(found.values(load(str(path.parent / "parents" / "vit_1")), "vit.layers.1", "cls"), expected["values.2"])


@written("activations_of_images.npz", "activations_of_texts.safetensors", "activations_of_texts")
def test_activations_are_the_same(path: Path) -> None:
    found, expected = Activations.load(path), answer(path)
    if mask := path.name.startswith("activations_of_texts"):
        assert found.mask is not None and found.mask.tolist() == expected.pop("mask").tolist()
    else:
        assert found.mask is None and set(found.grids.values()) == {(2, 2)}
    assert found.ids == (tuple(range(5)) if mask else tuple(f"picture {i}" for i in range(5)))
    assert found.pooling == "none" and found.values.keys() == expected.keys()
    for layer, values in expected.items():
        close(found.values[layer], values)


@written("recordings", "recordings_of_weights")
def test_recordings_can_be_compared(path: Path) -> None:
    name, metric = ("dynamics_of_weights", "weight_cosine") if "weights" in path.name else ("dynamics", "linear_cka")
    found = training.Dynamics.of(path, metric)
    expected = training.Dynamics.load(path.parent / "results" / f"{name}.json")
    assert found.steps == expected.steps == (0, 1, 2) and found.values.keys() == expected.values.keys()
    for layer, values in expected.values.items():
        close(found.values[layer], torch.from_numpy(values))


# -- results -----------------------------------------------------------------------------------------------------------
def kept(found: Any, expected: Any) -> bool:
    """Whether JSON values are still there; fields may have been added."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(key in found and kept(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(kept, found, expected))
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(found, expected, rel_tol=1e-12)  # derived values are computed again
    return bool(found == expected)


def renamed(values: Any) -> Any:
    """JSON values with the rows of comparisons, which were called a pooling."""
    if isinstance(values, list):
        return list(map(renamed, values))
    if not isinstance(values, dict):
        return values
    rows = {"rows": ROWS_OF.get(values["pooling"], values["pooling"])} if {"pooling", "routes"} <= values.keys() else {}
    return {name: renamed(value) for name, value in values.items() if not (rows and name == "pooling")} | rows


def saved_results(folder: Path) -> list[Result]:
    files = sorted(folder.glob("*.json"))
    return [KINDS[json.loads(file.read_text(encoding="utf-8"))["result"]].load(file) for file in files]


@written(*sorted({f"results/{file.name}" for file in FIXTURES.glob("*/results/*.json")}))
def test_every_value_of_a_result_is_kept(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    result = KINDS[record.pop("result")].load(path)
    others = ("verdict", "snippet")  # worded again from the values, and a script that the doctor no longer writes
    assert kept(result.to_dict(), {name: value for name, value in renamed(record).items() if name not in others})
    assert str(result) and len(result.to_pandas())


@written("results")
def test_a_page_has_the_same_results_as_the_files(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    page.write_bytes(gzip.decompress((path / "page.html.gz").read_bytes()))

    def described(results: list[Result]) -> list[str]:
        return sorted(json.dumps({"result": type(result).__name__, **result.to_dict()}) for result in results)

    monkeypatch.setattr("hf_stitch.reports.page._below", lambda kind: set())  # as if nothing had been imported
    found = load_report(page)
    assert {type(result) for result in found} == set(KINDS.values())  # the registry finds the classes of plugins
    assert described(found) == described(saved_results(path))
