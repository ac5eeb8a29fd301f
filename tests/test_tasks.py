"""Heads of every kind: scored by the right task, or refused by name in every verb."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from datasets import Dataset
from hf_stitch_studies import TrajectoryRecorder, bench, mode_connectivity
from tiny_networks import LAYERS, TEXT, WORDS, adapted, build, plain_tokenizer
from torch import nn
from transformers.models.auto import modeling_auto

import hf_stitch
from benchmarks.tiny import config as tiny_config
from hf_stitch.adapters.libraries.configs import task_of_head, unscored_head
from hf_stitch.artefacts import StitchedModel
from hf_stitch.artefacts.joining import join
from hf_stitch.data import Samples
from hf_stitch.registry import registries
from hf_stitch.stitches import IdentityStitch, StitchingLayer
from hf_stitch.tasks.heads import task_named, task_of
from hf_stitch.training import StitchabilityCallback, TaskLoss

TASKS = [name for name in registries.tasks if name != "feature-extraction"]
REFUSED = r"which cannot be scored \(tasks: feature-extraction, "
BERT = "bert.encoder.layer.1"
TEXTS = [f"{a} {b} {c}" for a, b, c in zip(WORDS, WORDS[7:] + WORDS[:7], WORDS[20:] + WORDS[:20], strict=True)]
DATA = Samples.of(TEXTS, label=[i % 2 for i in range(len(TEXTS))])


def bert(name: str, seed: int = 0, **options: Any) -> hf_stitch.Adapter:
    torch.manual_seed(seed)
    return adapted("bert", getattr(transformers, name)(transformers.BertConfig(**TEXT, **options)).eval())


def joined(network: hf_stitch.Adapter, task: str | None, layer: str = BERT) -> StitchedModel:
    """A stitched model of a network with itself, as artefacts of earlier versions or ``join`` have it."""
    spec = network.spec(layer)
    stitch = StitchingLayer(spec, spec, "none", IdentityStitch(spec.width, spec.width))
    return join(network, layer, stitch, network, layer, task=task)


# -- the sweep ---------------------------------------------------------------------------------------------------------
AUTO = {
    name: {kind: (made if isinstance(made, str) else made[0]) for kind, made in table._model_mapping.items()}
    for name in sorted(dir(modeling_auto))
    if name.startswith("AutoModelFor")
    and name not in ("AutoModelForImageTextToText", "AutoModelForMultimodalLM")  # docs/towers_zoo.md has their types
    and (table := getattr(getattr(modeling_auto, name), "_model_mapping", None)) is not None  # len() loads all configs
}
FAMILIES = ("bert", "vit", "t5", "wav2vec2", "yolos", "segformer", "whisper", "speecht5", "videomae", "superpoint")
"""Model types that are taken for an Auto class if it has them; otherwise the first one of which a tiny one is built."""


def a_network(auto: str) -> hf_stitch.Adapter | None:
    """A tiny network of an Auto class; ``None`` if none of three types is built, or has example inputs."""
    ordered = sorted(AUTO[auto], key=lambda kind: (FAMILIES.index(kind) if kind in FAMILIES else len(FAMILIES), kind))
    for kind in ordered[:3]:
        made: Any = getattr(transformers, AUTO[auto][kind])
        try:
            config = tiny_config(kind)
            if not isinstance(config, made.config_class):
                config = next(part for part in vars(config).values() if isinstance(part, made.config_class))
            return hf_stitch.load(made._from_config(config).eval())
        except Exception:  # sizes that do not fit each other, a missing package, no example inputs
            continue
    return None


def test_every_class_with_a_head_has_a_task_or_is_named() -> None:
    classes = {made for table in AUTO.values() for made in table.values()}
    for name in classes:
        task = task_of_head(name, None)
        assert bool(task) + bool(unscored_head(name, None)) == bool(task or re.search("For[A-Z]", name)), name
    assert len(classes) > 500


@pytest.mark.parametrize("auto", AUTO)
@pytest.mark.filterwarnings("ignore")
def test_networks_of_every_auto_class_are_scored_by_their_task_or_refused(auto: str) -> None:
    network = a_network(auto)
    if network is None:
        assert all(unscored_head(name, None) or not re.search("For[A-Z]", name) for name in AUTO[auto].values())
        return
    name = type(network.model).__name__
    verbs: dict[str, Callable[..., Any]] = {
        "stitch": lambda task: hf_stitch.stitch(network, network, TEXTS, task=task, progress=False),
        "stitch_grid": lambda task: hf_stitch.stitch_grid(network, network, TEXTS, task=task, progress=False),
        "TaskLoss": lambda task: hf_stitch.stitch(network, network, TEXTS, matcher="task_loss", task=task),
    }
    if network.unscored:
        for verb in verbs.values():
            for task in ("auto", *TASKS):
                with pytest.raises(ValueError, match=f"{name} has a head for {network.unscored}, {REFUSED}"):
                    verb(task)
        return
    family = task_named(network.task).family
    for task in (each for each in TASKS if each != network.task and (not family or task_named(each).family != family)):
        for verb in verbs.values():
            with pytest.raises(ValueError, match=f"task='{task}' (is not the task of|requires) "):
                verb(task)
    if network.task == "text-generation":  # BERT without is_decoder
        with pytest.raises(ValueError, match="the logits of BertLMHeadModel for a token depend on later tokens; use"):
            task_of(network, "auto")
    else:
        assert task_of(network, "auto") == network.task


# -- one family in every verb ------------------------------------------------------------------------------------------
def test_other_heads_are_refused_in_every_verb(tmp_path: Path) -> None:
    network, name = bert("BertForQuestionAnswering"), "BertForQuestionAnswering"
    message = f"has a head for question answering, {REFUSED}.*: stitch with task=None"
    layers = {"source_layer": BERT, "target_layer": BERT}
    grids = {"layers": [BERT], "metrics": ["linear_cka"], "references": 2, "progress": False}
    plain, model = (joined(network, task) for task in (None, "text-classification"))
    maps = {"a": model.stitch, "b": model.stitch}
    swapped = {"encoder_layer": BERT, "target_layer": BERT, "data": DATA, "progress": False}
    verbs: dict[str, Callable[[], Any]] = {
        "bench": lambda: bench({"a": network, "b": network}, DATA, functional=["lstsq"], **grids),
        "swap": lambda: hf_stitch.swap(network, network, DATA.take(20), **swapped),
        "callback": lambda: StitchabilityCallback(network, DATA, layers=[BERT]).measure(bert("BertModel"), step=0),
        "evaluate": lambda: hf_stitch.evaluate(plain, DATA, target=network, progress=False),
        "evaluate, of a task": lambda: hf_stitch.evaluate(model, DATA, target=network, progress=False),
        "evaluate, against a model": lambda: hf_stitch.evaluate(model, DATA, target=plain),
        "fit": lambda: TaskLoss(max_steps=1).fit(model, DATA, target=network, progress=False),
        "audit": lambda: hf_stitch.audit(model, DATA, target=network, progress=False),
        "recorder": lambda: TrajectoryRecorder(model, DATA, target=network),
        "connectivity": lambda: mode_connectivity(model, maps, DATA, target=network),
    }
    for verb in verbs.values():
        with pytest.raises(ValueError, match=message):
            verb()
    with pytest.warns(UserWarning, match=f"is not scored, and the labels of the data are not used: {name} {message}"):
        model = hf_stitch.stitch(network, network, DATA, task=None, matcher="identity", progress=False, **layers)
    assert model.evaluation is None and model.config.scores is None
    mapped, own = model(**model.preprocess(TEXTS[:3])), network.forward(network.preprocess(TEXTS[:3]))
    assert all(torch.equal(mapped[part], own[part]) for part in own)
    model.save_pretrained(tmp_path)
    assert "pipeline_tag" not in (card := (tmp_path / "README.md").read_text()) and "argmax" not in card


# -- modules of torch and timm -----------------------------------------------------------------------------------------
def test_modules_with_a_single_output_are_no_classifiers() -> None:
    images = torch.randn(60, 3, 8, 8)
    made = [nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.ReLU(), nn.Linear(6, 1)).eval() for _ in range(2)]
    own = [hf_stitch.load(net, example_inputs=images[:2]) for net in made]
    texts = hf_stitch.load(
        nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(18, 1)), example_inputs=torch.zeros(2, 3, dtype=int)
    )
    of_timm = hf_stitch.load(timm.create_model("resnet10t", num_classes=1, channels=(8, 8, 8, 8)).eval())
    for net in (*own, texts, of_timm):
        assert net.task == task_of(net, "auto") == "regression"
        for task in ("image-classification", "text-classification"):
            with pytest.raises(ValueError, match=r"at least 2 classes\), but \w+ outputs \(2, 1\); remove task"):
                task_of(net, task)
    with pytest.raises(ValueError, match=r"task='text-generation' is not the task of Sequential \(head for"):
        task_of(texts, "text-generation")
    with pytest.raises(ValueError, match="at least 2 classes"):
        hf_stitch.stitch(*own, images, source_layer="2", target_layer="2", task="image-classification")
    data = Samples.of(list(images), label=[i % 2 for i in range(60)])
    model = hf_stitch.stitch(*own, data, source_layer="2", target_layer="2", progress=False)
    assert model.evaluation is not None and "accuracy" not in model.evaluation.scores["stitched"]
    with pytest.raises(ValueError, match="num_labels must be an integer >= 2"):
        hf_stitch.relative_model(own[0], images[:30], layer="2", num_labels=1)


# -- labels that are not used ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("family", "kind"), [("llama", "next tokens"), ("body", "without a head")])
@pytest.mark.parametrize("labels", [[i % 2 for i in range(60)], [i / 2 for i in range(60)]], ids=["classes", "numbers"])
def test_labels_that_are_not_used_are_told_once(family: str, kind: str, labels: list[float]) -> None:
    data = Dataset.from_dict({"text": TEXTS, "label": labels})
    network = adapted("llama", build("llama", 0)) if family == "llama" else bert("BertModel")
    layer = LAYERS["llama"] if family == "llama" else "encoder.layer.1"
    pair = {"source_layer": layer, "target_layer": layer, "progress": False}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = hf_stitch.stitch(network, network, data, matcher="ridge", **pair)
    assert len([each for each in told if "labels of the data are not used" in str(each.message)]) == 1
    assert model.evaluation is not None
    if family == "llama":
        grid = {"layers_a": [layer], "layers_b": [layer], "matchers": ["ridge"], "progress": False}
        for verb in (
            lambda: hf_stitch.audit(model, data.select(range(10)), detectors=["knn"], progress=False),
            lambda: hf_stitch.stitch_grid(network, network, data, **grid),
            lambda: hf_stitch.stitch(network, network, data, matcher=TaskLoss(max_steps=1), **pair),
        ):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    verb()
                except ValueError as error:  # the audit: fitted to these samples
                    assert "was fitted to" in str(error)
            assert len([each for each in told if f"not used: {kind}" in str(each.message)]) == 1


def test_a_live_network_is_not_what_a_task_calls_it() -> None:
    model = bert("BertForQuestionAnswering").model
    network = hf_stitch.load(model, task="text-generation", processor=plain_tokenizer())
    assert (network.task, network.unscored) == (None, "question answering")
