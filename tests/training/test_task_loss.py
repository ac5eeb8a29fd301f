"""Stitching layers trained on the task loss."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import random
import re
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks
from torch import nn

import hf_stitch
from hf_stitch import Samples, StitchedModel
from hf_stitch.reference import ModelReference, Settings
from hf_stitch.registry import registries
from hf_stitch.stitches import Stitch
from hf_stitch.training import DivergedError, TaskLoss

from tiny_networks import LAYERS, WORDS, network  # isort: skip

N, SIZE, CLASSES = 90, 8, "image-classification"


class Net(nn.Module):
    """Convolutional network with BatchNorm; its cuts are c1, c2 and c3."""

    def __init__(self, seed: int, classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        widths = (3, 6, 8, 10)
        for i in range(3):
            layer = nn.Sequential(nn.Conv2d(widths[i], widths[i + 1], 3, padding=1), nn.BatchNorm2d(widths[i + 1]))
            layer[1].running_mean.normal_()
            self.add_module(f"c{i + 1}", layer)
        self.fc = nn.Linear(10, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            x = self.get_submodule(f"c{i + 1}")(x).relu()
        return self.fc(x.mean((2, 3)))


def adapters(dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    example = torch.randn(2, 3, SIZE, SIZE, dtype=dtype)
    return tuple(hf_stitch.load(Net(seed).to(dtype), example_inputs=example) for seed in (0, 1))  # type: ignore[return-value]


def samples(n: int = N, dtype: torch.dtype = torch.float64) -> Samples:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(n, 3, SIZE, SIZE, generator=generator, dtype=torch.float64).to(dtype)
    return Samples.of(images, label=torch.randint(0, 4, (n,), generator=generator).tolist())


@functools.cache
def _default() -> StitchedModel:
    return _build(("c2", "c2"), samples(), torch.float64)


def stitched(
    layers: tuple[str, str] = ("c2", "c2"), data: Any = None, dtype: torch.dtype = torch.float64, **options: Any
) -> StitchedModel:
    """Return a stitched model of its own; the default one is built once and copied."""
    if (layers, data, dtype, options) == (("c2", "c2"), None, torch.float64, {}):
        copied = copy.deepcopy(_default())
        copied.parents = _default().parents  # a copy has none
        return copied
    return _build(layers, data or samples(dtype=dtype), dtype, **options)


def _build(layers: tuple[str, str], data: Any, dtype: torch.dtype, **options: Any) -> StitchedModel:
    a, b = adapters(dtype)
    options = {"matcher": "lstsq", "task": CLASSES, "progress": False, "test_size": 10, **options}
    return hf_stitch.stitch(a, b, data, source_layer=layers[0], target_layer=layers[1], **options).to(dtype)


def matcher(**options: Any) -> TaskLoss:
    return TaskLoss(**{"labels": "hard", "max_steps": 20, "batch_size": 16, "schedule": "constant", **options})


def fit(training: TaskLoss, model: Any = None, data: Any = None, **options: Any) -> Any:
    """Train the map of a model, by default one of its own, or those of several, without a bar."""
    given = stitched() if model is None else model, samples() if data is None else data
    return training.fit(*given, **{"progress": False, **options})


def weights(layer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in layer.parameters()])


# -- agreement of all ways --------------------------------------------------------------------------------------------
def test_trainer_and_task_loss_agree() -> None:
    ours = fit(matcher(shuffle=False, max_grad_norm=0.5, lr=1e-2, schedule="linear"), data=samples(96))
    assert torch.allclose(weights(ours), weights(of_the_trainer()), atol=1e-5, rtol=0)


def test_stored_and_recomputed_activations_agree() -> None:
    model, training = stitched(), matcher(labels={"hard": 0.5, "target": 0.3, "source": 0.2})
    kept = fit(training, model)
    same = fit(training, model, augment=lambda images, generator: images)
    assert torch.allclose(weights(kept), weights(same), atol=1e-10, rtol=0)


def double(family: str, seed: int = 0) -> Any:
    return network(family, seed, "float64")


def words(count: int) -> list[dict[str, Any]]:
    g = random.Random(1)
    return [{"text": " ".join(g.choices(WORDS, k=g.randint(2, 9))), "label": g.randrange(3)} for _ in range(count)]


def of_texts(source: str, target: str) -> StitchedModel:
    return ridge(double(source), double(target, 1), words(80), source, target).to(torch.float64)


def mixture_of_two(folder: Path | None) -> list[Any]:
    training = matcher(labels={"hard": 0.5, "target": 0.5}, feature_steps=5, patience=9)
    state = None if folder is None else folder / "state"
    return fit(training, [stitched(), stitched(("c3", "c2"))], validation_data=samples(31), checkpoint_dir=state)


def of_the_trainer() -> Any:
    from transformers import Trainer, TrainingArguments

    model, data = stitched(), samples(96)
    rows = [{"pixel_values": x, "labels": y} for x, y in zip(next(data.batches(96)).samples, data.labels, strict=True)]
    frozen = copy.deepcopy((model.source.state_dict(), model.target.state_dict()))
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            place, max_steps=20, per_device_train_batch_size=16, learning_rate=1e-2, lr_scheduler_type="linear",
            optim="adamw_torch", weight_decay=0.0, max_grad_norm=0.5, report_to=[], use_cpu=True, disable_tqdm=True,
            train_sampling_strategy="sequential", save_strategy="no",
        )  # fmt: skip
        Trainer(model.freeze_networks(), arguments, train_dataset=rows).train()  # type: ignore[arg-type]
    for half, before in zip((model.source, model.target), frozen, strict=True):
        assert all(torch.equal(value, before[name]) for name, value in half.state_dict().items())
    return model.stitch


def accumulated_with_a_tail_of_one() -> list[Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    found = fit(matcher(penalties={"l1": 1e-2}, max_grad_norm=0.5), [stitched()], samples(81), accelerator=accelerator)
    accelerator.gradient_accumulation_steps = 1  # a setting that all accelerators share
    return found


def share(rank: int, folder: Path) -> None:
    found = (mixture_of_two(folder), accumulated_with_a_tail_of_one())
    torch.save([[weights(layer) for layer in layers] for layers in found], folder / f"{rank}.pt")


def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    run_ranks(2, share, tmp_path)
    both = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for place, alone in enumerate((mixture_of_two(None), accumulated_with_a_tail_of_one())):
        for number, layer in enumerate(alone):
            differences = [(of_rank[place][number] - weights(layer)).abs().max() for of_rank in both]
            assert max(differences) < 1e-6, (place, number, differences)


def test_folder_of_another_job_raises_with_the_differences(tmp_path: Path) -> None:
    fit(matcher(), checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match=r"a different job: matcher.lr \(0.001, now 0.5\)\. Use"):
        fit(matcher(lr=0.5), checkpoint_dir=tmp_path)
    for name, data, options in (
        ("data", samples(40), {}),
        ("validation_data", samples(), {"validation_data": samples(20)}),
        ("augment", samples(), {"augment": lambda images, generator: images}),
    ):
        with pytest.raises(ValueError, match=f"a different job: {name} "):
            fit(matcher(), data=data, checkpoint_dir=tmp_path, **options)


def test_non_finite_loss_stops_and_keeps_the_last_state(monkeypatch: Any, tmp_path: Path) -> None:
    model, folder = stitched(), tmp_path / "job"
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    flags = [(parameter.requires_grad, parameter.device) for parameter in model.parameters()]

    def poison(step: int, layers: Any) -> None:
        if step == 12:
            assert list((tmp_path / "temporary").iterdir())  # activations
            layers[0].body.weight.data.fill_(float("nan"))

    with pytest.raises(DivergedError, match=r"stitch '0' diverged: the loss is nan at step 12; .*: lower"):
        fit(matcher(), model, checkpoint_dir=folder, save_every=5, callback=poison)
    assert not list((tmp_path / "temporary").iterdir())
    assert flags == [(parameter.requires_grad, parameter.device) for parameter in model.parameters()]
    seen: list[int] = []
    fit(matcher(), model, checkpoint_dir=folder, callback=lambda step, _: seen.append(step))
    assert seen[0] == 11


@pytest.mark.parametrize("limited", [False, True])
def test_a_diverging_stitch_spares_those_trained_with_it(tmp_path: Path, limited: bool) -> None:
    """The others have the weights of training without poison; also after resuming, which trains nothing anew."""
    models = [stitched((f"c{i}", "c2")) for i in (1, 2, 3)] + [stitched(("c1", "c1"))]
    training = matcher(max_grad_norm=0.1 if limited else None)
    expected = fit(training, models)

    def poison(step: int, layers: Any) -> None:
        if step == 7 and len(layers) == 3:
            layers[1].body.weight.data[0, 0] = float("nan")

    for again in (False, True):
        with pytest.raises(DivergedError, match="stitch '1' diverged: the loss is nan at step 7; the last") as error:
            fit(training, models, checkpoint_dir=tmp_path, save_every=5, callback=None if again else poison)
        assert list(error.value.reasons) == [1] and error.value.trained[1] is None
        for place in (0, 2, 3):
            assert torch.equal(weights(error.value.trained[place]), weights(expected[place]))


def test_weights_that_the_last_step_breaks_are_an_error() -> None:
    with pytest.raises(DivergedError, match="2 of 2 stitches diverged, first '0': weights are NaN or infinite after"):
        fit(matcher(max_steps=1, lr=1e300, weight_decay=1e300), [stitched(), stitched()])


# -- objective -------------------------------------------------------------------------------------------------------
def test_loss_equals_its_definition() -> None:
    from hf_stitch.training.objective import Objective

    logits, target = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    hard = torch.randint(0, 4, (5,))
    task = registries.tasks.build("image-classification")
    got = Objective({"hard": 0.3, "target": 0.7}, 2.0).loss(task, logits, {"hard": hard, "target": target})
    one_hot = nn.functional.cross_entropy(logits, hard, reduction="sum")
    soft = nn.functional.cross_entropy(logits / 2, (target / 2).softmax(-1), reduction="sum")
    assert torch.allclose(got, 0.3 * one_hot + 4 * 0.7 * soft)


def test_training_lowers_the_loss_and_does_not_change_the_model() -> None:
    """Training mode, in which BatchNorm would take the statistics of a batch, plays no part and is restored."""
    model = stitched()
    expected = fit(matcher(max_steps=60, lr=1e-2), model)
    before = copy.deepcopy(model.state_dict())
    model.train()
    model.source.model.c1.eval()
    flags = [p.requires_grad for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    layer = fit(matcher(max_steps=60, lr=1e-2), model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert flags == [p.requires_grad for p in model.parameters()]
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(weights(layer), weights(expected))
    assert losses(model.eval(), layer) < losses(model, model.stitch)
    assert layer.body.fitted["steps"] == 60 and layer.body.fitted["n"] == N


@torch.no_grad()
def losses(model: StitchedModel, layer: Any, data: Samples | None = None) -> float:
    """Loss of the model with another stitching layer."""
    batch = next((data or samples()).batches(N))
    return model.head(layer(model.source(**model.preprocess(batch.samples))), torch.tensor(batch.labels)).loss.item()


def test_penalties_change_weights_and_similarity() -> None:
    model, cka = stitched(("c2", "c3")), hf_stitch.metrics.linear_cka

    def trained(**penalties: float) -> Any:
        return fit(matcher(max_steps=60, lr=1e-2, penalties=penalties, labels="target"), model)

    plain, sparse, apart = trained(), trained(l1=0.3), trained(linear_cka=10.0)
    assert sparse.body.weight.abs().sum() < 0.5 * plain.body.weight.abs().sum()
    a, b = model.parents  # type: ignore[misc]
    images = next(samples().batches(N)).samples
    x, y = (net.encode(net.preprocess(images), layer)[layer] for net, layer in ((a, "c2"), (b, "c3")))
    with torch.no_grad():
        values = [cka(layer(x).rows(), y.rows()).item() for layer in (plain, apart)]
    assert values[1] < values[0] - 0.1


def test_a_proximal_step_is_a_soft_threshold_after_the_step_of_the_optimizer() -> None:
    model = stitched(("c2", "c3"))

    def trained(steps: int, **penalties: float) -> Any:
        training = matcher(max_steps=steps, lr=1e-2, schedule="constant", penalties=penalties, labels="target")
        return fit(training, model).body

    plain, sparse = trained(1), trained(1, proximal_l1=5.0)
    assert torch.equal(sparse.weight, plain.weight.sign() * (plain.weight.abs() - 0.05).clamp(min=0))
    assert torch.equal(sparse.bias, plain.bias)
    # The gradient of the absolute value leaves hardly any weight at 0, the proximal step most of them.
    assert (trained(40, l1=1.0).weight == 0).sum() == 0
    assert (trained(40, proximal_l1=1.0).weight == 0).double().mean() > 0.5


def test_feature_steps_reduce_the_distance_of_final_features() -> None:
    model = stitched(("c1", "c1"), matcher="random")
    layer = fit(matcher(feature_steps=200, max_steps=1, lr=3e-2), model)
    a, b = model.parents  # type: ignore[misc]
    images = b.preprocess(next(samples().batches(N)).samples)
    wanted, given = b.encode(images, "c3")["c3"].values, a.encode(images, "c1")["c1"]
    found: list[torch.Tensor] = []
    model.target.model.get_submodule("c3").register_forward_hook(lambda m, args, output: found.append(output))
    with torch.no_grad():
        model.target(layer(given)), model.target(model.stitch(given))
    after, before = ((each - wanted).square().mean().item() for each in found)
    assert after < 0.7 * before


CUTS = (("c2", "c2"), ("c3", "c2"), ("c2", "c3"), ("c3", "c3"))
"""Pairs of cuts, of which several begin or end at the same."""


@pytest.mark.parametrize("penalty", ["l1", "direct_matching"])
def test_several_cuts_in_one_call_are_those_of_separate_training(penalty: str) -> None:
    models, data = [stitched(cut) for cut in CUTS], samples()
    training = matcher(max_grad_norm=0.1, penalties={penalty: 0.5 if penalty == "direct_matching" else 1e-3})
    for model, layer in zip(models, fit(training, models, data), strict=True):
        assert torch.allclose(weights(layer), weights(fit(training, model, data)), rtol=1e-10, atol=1e-12)
        assert layer.body.fitted["steps"] == 20


def test_several_cuts_read_each_cut_of_the_source_once() -> None:
    from hf_stitch.artefacts.joining import join_all
    from hf_stitch.pairs import Pair

    a, b = adapters()
    layers = {cut: stitched(cut).stitch for cut in CUTS}
    models = join_all(Pair(a, b, task=CLASSES).at(layers), layers)
    assert len({id(model.source) for model in models.values()}) == 2 == len({id(m.target) for m in models.values()})
    counts = {"c2": 0, "c3": 0}

    def count(front: Any, layer: str) -> None:
        front.register_forward_hook(lambda *_: counts.update({layer: counts[layer] + 1}))

    for layer, model in {cut[0]: model for cut, model in models.items()}.items():
        count(model.source, layer)
    fit(matcher(batch_size=N, max_steps=3), list(models.values()))
    # Once for the rehearsal of all groups, and once for the stored activations.
    assert counts == {"c2": 2, "c3": 2}


def test_orthogonal_maps_stay_orthogonal_with_plain_weights() -> None:
    layer = fit(matcher(orthogonal=True, lr=1e-2), stitched(matcher="procrustes"))
    assert torch.allclose(layer.body.weight @ layer.body.weight.T, torch.eye(8, dtype=torch.float64), atol=1e-6)
    assert {name for name, _ in layer.body.named_parameters()} == {"weight", "bias"}


def test_patience_keeps_the_best_layers_and_stops_early() -> None:
    steps: list[int] = []
    held_out = samples(40)
    options: dict[str, Any] = {"lr": 3.0, "batch_size": 30, "feature_steps": 20}
    model = stitched()
    watched = {"validation_data": held_out, "callback": lambda step, _: steps.append(step)}
    layer = fit(matcher(max_steps=600, patience=2, **options), model, **watched)
    assert 20 < steps[-1] == layer.body.fitted["steps"] < 600
    last = fit(matcher(max_steps=steps[-1] - 20, **options), model)

    assert losses(model, layer, held_out) < losses(model, last, held_out)


def test_losses_are_logged_to_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    accelerator, rows = Accelerator(cpu=True), list[Any]()
    accelerator.trackers = ["kept"]
    monkeypatch.setattr(accelerator, "log", lambda values, step: rows.append((step, values)))
    fit(matcher(max_steps=6, batch_size=30), validation_data=samples(20), accelerator=accelerator)
    assert [step for step, row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [step for step, row in rows if "validation accuracy" in row] == [3, 6]


def test_non_finite_validation_loss_stops() -> None:
    images = next(samples(20).batches(20)).samples
    images[3] = torch.full_like(images[3], 1e308)
    poisoned = Samples.of(torch.stack(images), label=[0] * 20)
    with pytest.raises(DivergedError, match="stitch '0' diverged: the validation loss is inf at step"):
        fit(matcher(), validation_data=poisoned)


# -- texts ------------------------------------------------------------------------------------------------------------
def ridge(a: Any, b: Any, data: Any, source: str, target: str, **options: Any) -> StitchedModel:
    place = {"source_layer": LAYERS[source], "target_layer": LAYERS[target], "matcher": "ridge"}
    return hf_stitch.stitch(a, b, data, progress=False, **{**place, **options})


def test_padding_does_not_change_the_loss(net: Any, texts: Any) -> None:
    """The loss of the first step equals that of the model for texts of different lengths."""
    model = ridge(net("gpt2"), net("llama", 1), texts, "gpt2", "llama")
    layer = fit(matcher(max_steps=1, batch_size=80, lr=1e-9), model, texts)
    inputs = model.preprocess([text["text"] for text in texts])
    labels = inputs["input_ids"].masked_fill(~inputs["attention_mask"].bool(), -100)
    with torch.no_grad():
        assert layer.body.fitted["loss"] == pytest.approx(model(**inputs, labels=labels).loss.item(), rel=1e-5)


# -- errors ----------------------------------------------------------------------------------------------------------
def test_texts_without_a_next_token_are_refused() -> None:
    with pytest.raises(ValueError, match=r"texts must contain a second token to predict \(first sample: 0"):
        fit(matcher(), of_texts("gpt2", "llama"), ["w1"] * 20)
    layer = fit(matcher(batch_size=1), of_texts("gpt2", "llama"), ["w1", "w2", "w1 w2 w3"])
    assert layer.body.fitted["n"] == 3  # the first batch may contain none


@pytest.mark.parametrize(("options", "message"), [
    ({"labels": "soft"}, "labels must be one of .hard., .target., .source. or a dictionary, got 'soft'"),
    ({"labels": {"hard": 0.0}}, r"labels\['hard'\] must be a number > 0, got 0.0"),
    ({"penalties": {"mutual_knn": 1.0}}, "penalty 'mutual_knn' must be 'l1', 'proximal_l1' or a differentiable metric"),
    ({"penalties": {"jensen_shannon": 1.0}}, "differentiable metric of representations"),
    ({"penalties": {"l2": 1.0}}, "no 'l2' among metrics"),
    ({"penalties": {"l1": -1.0}}, "the weight of penalty 'l1' must be a number above 0, got -1.0"),
    ({"penalties": {"linear_cka": float("nan")}}, "of penalty 'linear_cka' must be a finite number other than 0"),
    ({"orthogonal": True, "initial": {"name": "low_rank", "rank": 2}}, "requires a map of full rank"),
    ({"orthogonal": True, "penalties": {"l1": 1.0}}, "remove weight_decay and the penalties 'l1'"),
    ({"initial": "task_loss"}, "initial must be a matcher of moments or of rows, got 'task_loss'"),
    ({"preset": "other"}, "preset 'other'. Available: csiszarik2021, balogh2025, final_features"),
])  # fmt: skip
def test_options_out_of_range_raise(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskLoss.preset(options["preset"]) if "preset" in options else TaskLoss(**options)


class Doubling(Stitch):
    """A map without parameters."""

    type = "doubling"

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def config(self) -> dict[str, Any]:
        return {"in_features": self.in_features, "out_features": self.out_features}


def doubling() -> StitchedModel:
    model = stitched()
    model.stitch = model.stitch.with_maps(Doubling(8, 8), None)
    return model


def of_another_processor() -> dict[str, Any]:
    model, target = stitched(), adapters()[1]
    recorded = ModelReference.from_dict(model.config.target["reference"])
    changed = dataclasses.replace(recorded, processor=Settings.of({"image_mean": 0.5}))
    model.config.target = {**model.config.target, "reference": changed.to_dict()}
    target.processor = torch.as_tensor
    return {"training": matcher(labels="target"), "model": model, "target": target}


def backwards() -> StitchedModel:
    b, a = adapters()
    return hf_stitch.stitch(a, b, samples(), source_layer="c2", target_layer="c2", task=CLASSES, progress=False)


OF_RANK_2 = {"matcher": {"name": "low_rank", "rank": 2}}
REFUSALS: dict[str, Callable[[], object]] = {
    "labels='hard' requires labelled samples": lambda: stitched(data=samples().unlabelled(), matcher=matcher()),
    "task_loss requires a task": lambda: stitched(matcher=TaskLoss(), task=None),
    r"must have the same target, got None \(sha256:\w+\), None \(sha256:\w+\)": lambda: fit(
        matcher(), [stitched(), backwards()]
    ),
    "patience requires validation samples": lambda: fit(matcher(patience=1)),
    "patience requires validation": lambda: stitched(("auto", "c2"), matcher=matcher(patience=1)),
    "orthogonal=True requires affine maps, but the body map is LowRank": lambda: fit(
        matcher(orthogonal=True), stitched(**OF_RANK_2)
    ),
    "'proximal_l1' requires affine maps, but the body map of stitch '0' is LowRank": lambda: fit(
        matcher(penalties={"proximal_l1": 0.1}), stitched(**OF_RANK_2)
    ),
    "without trainable parameters; start from another map": lambda: fit(matcher(), doubling()),
    "does not have trainable parameters; stitch with another": lambda: stitched(matcher="identity").freeze_networks(),
    "target of the stitched model in weights": lambda: fit(matcher(labels="target"), target=adapters()[0]),
    r"stitched model in processor \(class not set, now 'user code'; image_mean": lambda: fit(**of_another_processor()),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_cannot_be_trained_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSALS[message]()


FIRST_BATCH_ERRORS = {
    "the source outputs logits of shape (16, 7), the target of shape (16, 4)": {"labels": "source"},
    "sample 5 has label 9, but the target predicts classes 0 to 3": {"labels": "hard"},
    "final features have shape (16, 10, 1, 1) through the stitch, but (16, 10, 8, 8) in": {"feature_steps": 1},
    "the penalty 'cca' requires at least 10 rows, but the batch of a process has 4": {
        "penalties": {"cca": 1.0}, "batch_size": 4, "labels": "target",
    },
}  # fmt: skip


@pytest.mark.parametrize("message", FIRST_BATCH_ERRORS)
def test_errors_of_training_are_raised_before_activations_are_computed(message: str, monkeypatch: Any) -> None:
    example = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    a, b = hf_stitch.load(Net(0, classes=7).double(), example_inputs=example), adapters()[1]
    labels = [9 if place == 5 and "label 9" in message else 0 for place in range(40)]
    data = Samples.of(torch.randn(40, 3, SIZE, SIZE, dtype=torch.float64), label=labels)
    training = matcher(**FIRST_BATCH_ERRORS[message])
    test = data.select(range(6, 40))
    options: dict[str, Any] = {"source_layer": "c2", "target_layer": "c2", "task": CLASSES, "pooling": "mean"}
    model = hf_stitch.stitch(a, b, test, matcher="ridge", **options, progress=False).to(torch.float64)
    monkeypatch.setattr("hf_stitch.workflows._stitch.CollectedPair", None)
    monkeypatch.setattr("hf_stitch.training.task_loss.Prepared", None)
    with pytest.raises(ValueError, match=re.escape(message)):
        hf_stitch.stitch(a, b, data, matcher=training, test_data=test, **options, progress=False)
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(training, model, data)
    if "label 9" in message:
        with pytest.raises(ValueError, match=re.escape(message)):
            fit(training, model, test, validation_data=data)


def test_metric_penalty_is_left_out_of_a_last_batch_of_one_row() -> None:
    options: dict[str, Any] = {"pooling": "mean", "matcher": "ridge"}
    training = matcher(penalties={"linear_cka": -1.0}, labels="target", max_steps=12)
    assert bool(weights(fit(training, stitched(**options), samples(33))).isfinite().all())


def test_penalties_count_once_in_accumulated_batches() -> None:
    from accelerate import Accelerator

    training = {"shuffle": False, "max_steps": 6, "penalties": {"l1": 0.1}}
    whole = fit(matcher(batch_size=40, **training))
    parts = fit(matcher(batch_size=20, **training), accelerator=Accelerator(cpu=True, gradient_accumulation_steps=2))
    assert torch.allclose(weights(whole), weights(parts), atol=1e-9, rtol=0)
    assert whole.body.fitted["loss"] == pytest.approx(parts.body.fitted["loss"], rel=1e-6)


def test_stitches_trained_together_stop_independently_and_resume_with_their_patience(tmp_path: Path) -> None:
    """Training is interrupted when one stitch has stopped and another has not."""
    models = [stitched((f"c{i}", "c2")) for i in (1, 2, 3)]
    training = matcher(lr=0.3, max_steps=300, batch_size=30, patience=2, max_grad_norm=1.0, weight_decay=1e-3)
    options: dict[str, Any] = {"validation_data": samples(40), "progress": False}
    whole = fit(training, models, **options)
    for one, model in zip(whole, models, strict=True):
        other = fit(training, model, **options)
        assert torch.allclose(weights(one), weights(other), atol=1e-6, rtol=0)
        assert one.body.fitted["steps"] == other.body.fitted["steps"]
        assert one.body.fitted["loss"] == pytest.approx(other.body.fitted["loss"], rel=1e-5)
    done = sorted(layer.body.fitted["steps"] for layer in whole)

    def interrupt(step: int, layers: Any) -> None:
        if step == done[0] + 1:
            raise InterruptedError

    assert done[0] + 1 < done[-1]
    with pytest.raises(InterruptedError):
        fit(training, models, callback=interrupt, checkpoint_dir=tmp_path, save_every=done[0], **options)
    for one, other in zip(fit(training, models, checkpoint_dir=tmp_path, **options), whole, strict=True):
        assert torch.equal(weights(one), weights(other)) and one.body.fitted == other.body.fitted


# -- precision --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maps_of_half_precision_are_trained_in_float32(dtype: torch.dtype) -> None:
    data = samples(dtype=dtype)
    model = stitched(data=data, dtype=dtype)
    assert model.stitch.body.weight.dtype == model.target.model.fc.weight.dtype == dtype
    training = matcher(lr=1e-4, max_steps=30)
    half = fit(training, model, data)
    model.stitch.float()
    whole = fit(training, model, data)
    assert (half.body.weight.dtype, whole.body.weight.dtype) == (dtype, torch.float32)
    assert torch.equal(half.body.weight, whole.body.weight.to(dtype))
    trained, untrained = (fit(how, model, data) for how in (training, matcher(lr=1e-9, max_steps=30)))
    assert trained.body.fitted["loss"] < untrained.body.fitted["loss"]


def test_gradient_scale_is_saved() -> None:
    from hf_stitch.training.loop import Progress
    from hf_stitch.training.stitches import Stitches

    def run(scale: float) -> Any:
        model = stitched()
        task = registries.tasks.build("image-classification")
        stitches = Stitches({"0": model.stitch}, model.target, task, matcher().objective, "c3", {"0": "0"})
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        return Progress(stitches, torch.optim.Adam(stitches.layers.parameters()), scaler, None)

    before, after = run(8.0), run(2.0)
    before._scaler._growth_tracker = torch.tensor(7, dtype=torch.int32)
    before._scaler._scale = torch.tensor(8.0)
    after.load(before.state())
    assert after._scaler.state_dict() == before._scaler.state_dict()
    assert after._scaler.get_scale() == 8.0


# -- files and memory ------------------------------------------------------------------------------------------------


def test_cache_size_is_compared_with_the_size_of_the_files(monkeypatch: Any, tmp_path: Path) -> None:
    """The first texts are longer than the later ones, so that a linear estimate would be too large."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    texts = [{"text": " ".join(WORDS[: 9 if place < 64 else 3])} for place in range(200)]
    model = of_texts("gpt2", "llama")
    sizes: list[int] = []

    def written(*_: Any) -> None:
        sizes.append(sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()))

    def trained(cache_size: float) -> Any:
        watched = {"cache_size": cache_size, "callback": written}
        return fit(matcher(max_steps=2), model, texts, **watched)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = trained(8e9)
        assert sizes[0] > 0 and not list(tmp_path.iterdir())
        assert torch.equal(weights(trained(sizes[0])), weights(kept))
    with pytest.warns(UserWarning, match="recomputed for each batch; raise cache_size"):
        recomputed = trained(sizes[0] - 1)
    assert sizes[-1] == 0
    assert torch.allclose(weights(recomputed), weights(kept), atol=1e-9)


def test_accelerator_does_not_keep_trained_layers_alive() -> None:
    from accelerate import Accelerator

    accelerator, seen = Accelerator(cpu=True), []
    watched = {"callback": lambda step, layers: seen.append(weakref.ref(layers[0]))}
    fit(matcher(max_steps=2), accelerator=accelerator, **watched)
    gc.collect()
    assert seen[0]() is None


def test_samples_are_not_hashed_without_checkpoint(monkeypatch: Any) -> None:
    model = stitched()
    monkeypatch.setattr(Samples, "fingerprint", property(lambda self: pytest.fail("fingerprint was computed")))
    fit(matcher(max_steps=2), model, validation_data=samples(20))


def test_maps_of_prefix_tokens_are_trained(net: Any, images: Any) -> None:
    model = ridge(net("deit"), net("vit", 1), images, "deit", "vit")
    layer = fit(matcher(penalties={"l1": 1e-3}, lr=1e-2), model, images)
    assert layer.parts == ("body", "prefix")
    for part in layer.parts:
        assert not torch.allclose(getattr(layer, part).weight, getattr(model.stitch, part).weight, atol=1e-3)
        assert getattr(layer, part).fitted["steps"] == 20
    data = Samples.of(images)
    assert losses(model, layer, data) < losses(model, model.stitch, data)


def test_a_correction_of_low_rank_is_all_that_is_trained() -> None:
    a, b = adapters(torch.float32)
    data = torch.randn(N, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    place: Any = {"source_layer": "c2", "target_layer": "c2", "task": CLASSES, "progress": False}
    start = {"name": "low_rank_residual", "rank": 2, "ridge": 1.0}
    first = hf_stitch.stitch(a, b, data, matcher=start, **place)
    ridge = hf_stitch.stitch(a, b, data, matcher="ridge", ridge=1.0, **place)
    x = torch.randn(5, 8)
    assert torch.equal(first.stitch.body(x), ridge.stitch.body(x))
    trained = hf_stitch.stitch(a, b, data, matcher=TaskLoss(initial=start, epochs=2, lr=0.1), **place).stitch.body
    assert torch.equal(trained.weight, ridge.stitch.body.weight) and torch.equal(trained.bias, ridge.stitch.body.bias)
    change = trained.matrix() - ridge.stitch.body.weight
    assert change.abs().max() > 1e-3 and torch.linalg.matrix_rank(change) == 2
    assert sum(parameter.numel() for parameter in trained.parameters()) == 2 * (8 + 8)


def test_a_matcher_of_rows_is_a_start() -> None:
    a, b = adapters(torch.float32)
    data = torch.randn(N, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    place: Any = {"source_layer": "c2", "target_layer": "c2", "task": CLASSES, "progress": False}
    start = {"name": "residual_mlp", "width": 4, "epochs": 2}
    first = hf_stitch.stitch(a, b, data, matcher=start, **place)
    kept = []

    def record(_: int, layers: list[Any]) -> None:
        kept.append(copy.deepcopy(layers[0].state_dict()))

    trainer = TaskLoss(initial=start, epochs=2, lr=0.01)
    options = {name: value for name, value in trainer.to_dict().items() if name != "name"}
    assert trainer.initial.name == "residual_mlp" and TaskLoss(**options) == trainer
    fit(trainer, first, data, callback=record)
    assert all(torch.equal(value, first.stitch.state_dict()[name]) for name, value in kept[0].items())
    model = hf_stitch.stitch(a, b, data, matcher=trainer, **place)
    before = dict(first.stitch.named_parameters())
    assert all(not torch.equal(weight, before[name]) for name, weight in model.stitch.named_parameters())
    plan = hf_stitch.plan(hf_stitch.stitch, a, b, data, matcher=trainer, **place)
    assert plan.memory["rows"] > 0 and plan.stages["training"] > 0
    with pytest.raises(ValueError, match=r"'residual_mlp.*requires rows, but a grid stores only moments"):
        hf_stitch.stitch_grid(a, b, data, matchers=[trainer], task=CLASSES, progress=False)


def test_a_stitch_that_looks_at_several_positions(texts: Any, inputs: Any) -> None:
    """It begins as a ridge regression, every weight of it is trained, and padding or later tokens play no part."""
    a, b = network("gpt2"), network("llama", 1)
    start = {"name": "attention", "heads": 2, "width": 8, "causal": True, "ridge": 1.0}
    first, linear, model = (
        ridge(a, b, texts, "gpt2", "llama", matcher=each)
        for each in (start, {"name": "ridge", "ridge": 1.0}, TaskLoss(initial=start, epochs=2, lr=0.01))
    )
    batch = inputs(a)
    before, mask = dict(first.stitch.named_parameters()), batch["attention_mask"].bool()
    assert all(not torch.equal(weight, before[name]) for name, weight in model.stitch.named_parameters())
    with torch.no_grad():
        assert torch.equal(first(**batch).logits, linear(**batch).logits)
        whole = model(**batch).logits
        other = model(**{**batch, "input_ids": batch["input_ids"].masked_fill(~mask, 9)}).logits
        cut = model(**{name: value[:, :4] for name, value in batch.items()}).logits
    torch.testing.assert_close(other[mask], whole[mask])
    torch.testing.assert_close(cut[mask[:, :4]], whole[:, :4][mask[:, :4]], rtol=1e-4, atol=1e-5)
    assert model.generate(**{name: value[:1, :3] for name, value in batch.items()}, max_new_tokens=3).shape == (1, 6)
    with pytest.raises(ValueError, match="'attention' requires causal=True"):
        ridge(a, b, texts, "gpt2", "llama", matcher="attention")
    model.stitch.body.causal = False
    with pytest.raises(ValueError, match="must be causal"):
        model(**batch)
