"""Training callbacks: they do not affect training, and their values are correct."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
from watched_networks import Net, Other, adapter, balanced, images, net, trainer

import hf_stitch
from hf_stitch.adapters import untrained
from hf_stitch.analysis import extract_activations
from hf_stitch.matchers.regression import Lstsq
from hf_stitch.training import Dynamics, DynamicsRecorder, SimilarityCallback, StitchabilityCallback

PROBE = images(40, seed=5)
BLOCK = "similarity_to_start/linear_cka/blocks.1"


@pytest.fixture(scope="module")
def reference() -> hf_stitch.Adapter:
    """A network that predicts all classes; the labels of the samples are its predictions."""
    return adapter(balanced(net(9), images(60, seed=6)))


def labelled(reference: hf_stitch.Adapter, n: int = 60) -> hf_stitch.Samples:
    points = images(n, seed=6)
    return hf_stitch.Samples.of(points, label=reference.forward(points)["logits"].argmax(1).tolist())


def logged(trained: Trainer, start: str) -> dict[int, dict[str, float]]:
    """Logged values whose names have a prefix, by step."""
    found: dict[int, dict[str, float]] = {}
    for entry in trained.state.log_history:
        found.setdefault(entry["step"], {}).update({k: v for k, v in entry.items() if k.startswith(start)})
    return {step: figures for step, figures in found.items() if figures}


# -- no side effects on training --------------------------------------------------------------------------------------
def test_training_with_callbacks_gives_identical_weights(tmp_path: Path, reference: hf_stitch.Adapter) -> None:
    data = labelled(reference)
    plain = trainer(tmp_path / "plain", eval_strategy="epoch")
    plain.train()
    watched = trainer(tmp_path / "watched", eval_strategy="epoch")
    own = adapter(watched.model)
    SimilarityCallback("start", PROBE, every=1).attach(watched, own)
    StitchabilityCallback(reference, data, every="epoch").attach(watched, own)
    DynamicsRecorder(tmp_path / "recordings", PROBE, every="eval").attach(watched, own)
    watched.train()
    found = watched.model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in plain.model.state_dict().items())
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (plain, watched)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_measurement_restores_all_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net().train()
    model.blocks[1].eval()  # a frozen BatchNorm stays frozen
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.blocks[0][0].weight.requires_grad_(False)
    callback, own = SimilarityCallback("start", PROBE), adapter(model)

    def everything() -> tuple[Any, ...]:
        tensors = [value.clone() for value in model.state_dict().values()]
        return (
            tensors, [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()],
            [None if p.grad is None else p.grad.clone() for p in model.parameters()], torch.get_rng_state(),
            np.random.get_state()[1].tolist(), random.getstate(), torch.is_grad_enabled(),
            [len(m._forward_hooks) for m in model.modules()],
        )  # fmt: skip

    drawn, preprocess = [], own.preprocess

    def draws(samples: Any) -> Any:
        drawn.append((random.random(), np.random.rand(), torch.rand(1)))
        return preprocess(samples)

    monkeypatch.setattr(own, "preprocess", draws)
    before = everything()
    callback.measure(own, step=0)
    after = everything()
    assert drawn
    assert all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b or a == b
        for x, y in zip(before, after, strict=True)
        for a, b in (zip(x, y, strict=True) if isinstance(x, (list, tuple)) else [(x, y)])
    )


def test_measurement_under_autocast_keeps_gradients() -> None:
    model, callback = net(), SimilarityCallback("start", PROBE)
    own = adapter(model)
    with torch.autocast("cpu", torch.bfloat16):
        callback.measure(own, step=0)
        model(images(4), torch.tensor([0, 1, 2, 0]))["loss"].backward()
    assert all(p.grad is not None for p in model.parameters())


# -- values -----------------------------------------------------------------------------------------------------------
def test_similarity_to_start_is_one_at_step_0_and_agrees_with_compare_later(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    start = adapter(net())
    callback = SimilarityCallback("start", PROBE, every="epoch").attach(run, adapter(run.model))
    run.train()
    found = logged(run, "similarity")
    assert sorted(found) == [0, 4, 8]
    assert all(value == pytest.approx(1, abs=1e-12) for value in found[0].values())
    atlas = hf_stitch.compare(adapter(run.model), start, PROBE, progress=False)
    assert found[8][BLOCK] == pytest.approx(atlas["linear_cka"][1, 1], rel=1e-6)
    assert found[8][BLOCK] < 0.95
    assert callback.to_pandas()["value"].tolist() == [v for step in (0, 4, 8) for v in found[step].values()]
    figure = callback.plot()
    assert len(figure.axes[0].lines) == len(found[0])
    assert figure.axes[0].lines[0].get_ydata().tolist() == [next(iter(found[step].values())) for step in (0, 4, 8)]
    with pytest.raises(ValueError, match=r"lacks nonsense; it has \['similarity_to_"):
        callback.plot(["nonsense"])


def test_previous_state_and_saved_activations_as_reference(tmp_path: Path, reference: hf_stitch.Adapter) -> None:
    run = trainer(tmp_path, num_train_epochs=1)
    own = adapter(run.model)
    SimilarityCallback("previous", PROBE, every=1).attach(run, own)
    SimilarityCallback("start", PROBE, every=1).attach(run, own)
    saved = extract_activations(reference, PROBE, layers=["blocks.0", "blocks.1"], progress=False)
    SimilarityCallback(saved, PROBE, every=1, name="saved").attach(run, own)
    SimilarityCallback(reference, PROBE, every=1, name="live").attach(run, own)
    run.train()
    previous, start = (logged(run, f"similarity_to_{kind}") for kind in ("previous", "start"))
    assert sorted(previous) == [1, 2, 3, 4]  # the first measurement has no previous one
    assert list(previous[1].values()) == pytest.approx(list(start[1].values()))
    assert list(previous[4].values()) != pytest.approx(list(start[4].values()))
    live, kept = logged(run, "live/"), logged(run, "saved/")
    assert [list(live[s].values()) for s in live] == [list(kept[s].values()) for s in live]


def test_layers_with_other_names_are_matched_by_similarity(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, other = net(), adapter(net(4, Other))
    callback = SimilarityCallback(other, PROBE, metrics=["linear_cka", "procrustes"])
    own = adapter(model)
    first = callback.measure(own, step=0)
    callback.measure(own, step=1)
    atlas = hf_stitch.compare(own, other, PROBE, metrics=["linear_cka", "procrustes"], progress=False)
    for metric in ("linear_cka", "procrustes"):  # procrustes is a distance: the lowest value is the best
        assert callback.matches[metric] == atlas.best_matches(metric)
    assert first["similarity_to_reference/procrustes/blocks.0"] == pytest.approx(atlas["procrustes"][0].min())
    assert sum("different names" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("target", ["blocks.0", "blocks.1"])
def test_stitchability_agrees_with_evaluate(reference: hf_stitch.Adapter, target: str) -> None:
    data, own = labelled(reference, 120), adapter(net(2))
    callback = StitchabilityCallback(reference, data, [("blocks.0", target)], matcher="ridge", ridge=0.1, seed=5)
    measured = callback.measure(own, step=0)
    assert {name.split("/")[2] for name in measured} == {"blocks.0" + "->blocks.1" * (target == "blocks.1")}
    found = {name.split("/")[1]: value for name, value in measured.items()}
    train, test = data.split(0.5, 5)
    expected = {}
    for kind, network in (("trained", own), ("untrained", untrained(own, 5))):
        stitched = hf_stitch.stitch(
            network, reference, train, source_layer="blocks.0", target_layer=target, matcher="ridge", ridge=0.1,
            test_data=test, task="image-classification", progress=False,
        )  # fmt: skip
        expected[kind] = {who: row["relative_accuracy"].value for who, row in stitched.evaluation.scores.items()}
    assert found == pytest.approx(
        {
            "relative_accuracy": expected["trained"]["stitched"], "identity": expected["trained"]["identity"],
            "mean_only": expected["trained"]["mean_only"], "untrained": expected["untrained"]["stitched"],
        }
    )  # fmt: skip
    with torch.no_grad():
        own.model.blocks[0][0].weight.mul_(-1)
    later = {name.split("/")[1]: value for name, value in callback.measure(own, step=1).items()}
    assert {kind for kind in found if later[kind] == found[kind]} >= {"mean_only", "untrained"}
    assert later["relative_accuracy"] != found["relative_accuracy"]
    without = StitchabilityCallback(reference, data, ["blocks.0"], untrained=False).measure(own, step=0)
    assert {name.split("/")[1] for name in without} == {"relative_accuracy", "identity", "mean_only"}


def test_an_untrained_copy_of_a_stitched_model_has_other_weights_in_both_halves() -> None:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=6, patch_size=2
    )
    networks = [adapter(net(2)), hf_stitch.load(transformers.ViTModel(config).eval())]
    for first, second in (networks, networks[::-1]):  # user code has no config from which it could be made anew
        pair = first.layers[0], second.layers[-1]
        made = hf_stitch.stitch(
            first, second, images(60), source_layer=pair[0], target_layer=pair[1], task=None,
            pooling="mean", matcher="ridge", progress=False,
        )  # fmt: skip
        own = hf_stitch.load(made)
        twin = untrained(own, 0)
        assert own.forward(own.example) is not None and twin.layers == own.layers
        for (name, before), after in zip(made.named_parameters(), twin.model.parameters(), strict=True):
            assert after.isfinite().all() and (before.std() == 0 or not torch.equal(before, after)), name


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compiled", "parallel"])
def test_wrapped_networks_are_unwrapped(wrap: Any) -> None:
    model = net()
    callback = SimilarityCallback("start", PROBE)
    callback.measure(adapter(model), step=0)
    assert callback.measure(wrap(model), step=1)[BLOCK] == pytest.approx(1)


def test_layer_that_dies_during_training_becomes_nan_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    own, callback = adapter(model), SimilarityCallback("start", PROBE)
    callback.measure(own, step=0)
    with torch.no_grad():
        model.blocks[1][1].weight.zero_(), model.blocks[1][1].bias.fill_(-1)
    found = callback.measure(own, step=1)
    assert np.isnan(found[BLOCK]) and found[BLOCK.replace("blocks.1", "blocks.0")] == pytest.approx(1)
    assert any("blocks.1" in message and "dead" in message for message in caplog.messages)
    with pytest.raises(ValueError, match=r"blocks\.1.*dead"):  # at the first measurement
        SimilarityCallback("start", PROBE).measure(own, step=0)


@pytest.mark.parametrize("bias", [float("nan"), 1e6])
def test_a_stitch_of_nan_or_without_solution_is_nan_alone(reference: hf_stitch.Adapter, bias: float) -> None:
    class Unsolved(Lstsq):
        def fit(self, moments: Any, dtype: torch.dtype = torch.float32) -> Any:
            if moments.mean_x.max() > 1e3:
                raise torch.linalg.LinAlgError("no convergence")
            return super().fit(moments, dtype)

    model = net()
    own, callback = adapter(model), StitchabilityCallback(reference, labelled(reference), matcher=Unsolved())
    callback.measure(own, step=0)
    with torch.no_grad():
        model.blocks[1][1].bias.fill_(bias)
    found = callback.measure(own, step=1)
    assert {name for name, value in found.items() if np.isnan(value)} == {"stitchability/relative_accuracy/blocks.1"}


def test_logits_that_are_nan_are_no_class(reference: hf_stitch.Adapter, caplog: pytest.LogCaptureFixture) -> None:
    points = images(60, seed=6)
    held_out = hf_stitch.Samples.of(points).split(0.5, 0)[1].ids[0]
    points[int(held_out)] *= 1e4
    data = hf_stitch.Samples.of(points, label=reference.forward(points)["logits"].argmax(1).tolist())
    model = net()
    own, callback = adapter(model), StitchabilityCallback(reference, data, untrained=False)
    callback.measure(own, step=0)
    model.blocks[1].register_forward_hook(
        lambda _, inputs, output: output.masked_fill(inputs[0].amax((1, 2, 3), keepdim=True) > 1e3, torch.nan)
    )
    found = callback.measure(own, step=1)
    undefined = {f"stitchability/{kind}/blocks.1" for kind in ("relative_accuracy", "identity")}
    assert {name for name, value in found.items() if np.isnan(value)} == undefined
    assert sum("its logits are NaN" in message for message in caplog.messages) == 2
    with pytest.raises(ValueError, match=r"from 'blocks\.1' to 'blocks\.1': its logits are NaN"):
        StitchabilityCallback(reference, data, untrained=False).measure(own, step=0)


# -- logging and metrics ----------------------------------------------------------------------------------------------
def test_values_are_logged_to_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    run = trainer(tmp_path, report_to=["tensorboard"], eval_strategy="epoch")
    SimilarityCallback("start", PROBE, every="eval").attach(run, adapter(run.model))
    run.train()
    events = event_accumulator.EventAccumulator(str(tmp_path / "events")).Reload()
    events_logged = [(event.step, event.value) for event in events.Scalars(f"train/{BLOCK}")]
    assert events_logged == [(step, pytest.approx(figures[BLOCK])) for step, figures in logged(run, BLOCK).items()]
    assert [step for step, _ in events_logged] == [0, 4, 8]


@pytest.mark.parametrize("every", ["eval", "epoch"])
def test_values_select_the_best_model(tmp_path: Path, every: Any) -> None:
    run = trainer(
        tmp_path, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model=BLOCK, num_train_epochs=3,
    )  # fmt: skip
    callback = SimilarityCallback("start", PROBE, every=every).attach(run, adapter(run.model))
    run.add_callback(EarlyStoppingCallback(early_stopping_patience=1))
    run.train()
    found = logged(run, BLOCK)
    assert sorted(found) == [0, 4, 8]  # stopped at step 8, further from the start; measured once per step
    assert run.state.best_global_step == 4 and run.state.best_metric == found[4][BLOCK]
    if every == "eval":  # the best model has been loaded: the value is that of step 4, not of step 8
        assert run.evaluate()[f"eval_{BLOCK}"] == pytest.approx(found[4][BLOCK], rel=1e-6)
        assert len(callback.history) == 4
    else:
        assert f"eval_{BLOCK}" not in run.evaluate()


def test_several_evaluation_sets_need_one_measurement(tmp_path: Path) -> None:
    run = trainer(tmp_path, eval_strategy="epoch", num_train_epochs=1)
    run.eval_dataset = {"a": run.eval_dataset, "b": run.eval_dataset}
    callback = SimilarityCallback("start", PROBE, every="eval").attach(run, adapter(run.model))
    run.train()
    assert [measured.step for measured in callback.history] == [0, 4]


# -- resuming ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["start", "previous"])
def test_resuming_restores_the_checkpoint(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "num_train_epochs": 2}

    def run() -> tuple[Trainer, SimilarityCallback, DynamicsRecorder]:
        made = trainer(tmp_path, net(), **options)
        own = adapter(made.model)
        callback = SimilarityCallback(kind, PROBE, every=3).attach(made, own)
        return made, callback, DynamicsRecorder(tmp_path / "recordings", PROBE, every=3).attach(made, own)

    whole, _, recorder = run()
    whole.train()
    dynamics = recorder.result()
    assert dynamics.steps == (0, 3, 6)
    again, callback, recorder = run()
    with torch.no_grad():
        again.model.head.weight.zero_()  # would change the values if the checkpoint were not loaded
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert logged(again, "similarity") == logged(whole, "similarity")
    assert [measured.step for measured in callback.history] == ([0, 3, 6] if kind == "start" else [3, 6])
    assert recorder.result().to_dict() == dynamics.to_dict()


def test_recordings_after_the_checkpoint_are_dropped_and_a_start_must_be_in_it(tmp_path: Path) -> None:
    first = trainer(tmp_path, save_strategy="steps", save_steps=4)
    DynamicsRecorder(tmp_path / "recordings", PROBE, every=1).attach(first, adapter(first.model))
    first.train()
    without = trainer(tmp_path)
    SimilarityCallback("start", PROBE).attach(without, adapter(without.model))
    with pytest.raises(ValueError, match=r"step 4.*start is not in the checkpoint"):
        without.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    second = trainer(tmp_path, net(), num_train_epochs=2)
    recorder = DynamicsRecorder(tmp_path / "recordings", PROBE, every=4).attach(second, adapter(second.model))
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert recorder.result().steps == (0, 1, 2, 3, 4, 8)
    assert len(list((tmp_path / "recordings").glob("*.safetensors"))) == 6


def test_folder_of_another_training_run_raises(tmp_path: Path) -> None:
    run = trainer(tmp_path, num_train_epochs=1)
    recorder = DynamicsRecorder(tmp_path / "recordings", PROBE).attach(run, adapter(run.model))
    run.train()
    with pytest.raises(ValueError, match="another training run"):
        run.train()
    with pytest.raises(ValueError, match="another training run"):
        DynamicsRecorder(recorder.folder, PROBE).measure(adapter(net()), step=0)


def test_second_training_run_starts_again(tmp_path: Path) -> None:
    run = trainer(tmp_path, num_train_epochs=1)
    callback = SimilarityCallback("start", PROBE).attach(run, adapter(run.model))
    run.train()
    run.train()
    assert [measured.step for measured in callback.history] == [0, 4]
    assert callback.history[0].figures[BLOCK] == pytest.approx(1, abs=1e-12)


# -- dynamics ----------------------------------------------------------------------------------------------------------
def test_dynamics_agree_with_compare_for_each_pair(tmp_path: Path) -> None:
    recorder = DynamicsRecorder(tmp_path, PROBE, pooling="none", metric="procrustes")
    adapters = [adapter(net(seed)) for seed in range(3)]
    model = net()
    own = adapter(model)
    for step, other in enumerate(adapters):
        model.load_state_dict(other.model.state_dict())
        recorder.measure(own, step=step)
    found = recorder.result()
    assert (found.unit, found.times, found.higher_is_better) == ("step", (0, 1, 2), False)
    for i, a in enumerate(adapters):
        for j, b in enumerate(adapters):
            atlas = hf_stitch.compare(
                a, b, PROBE, layers_a=["blocks.1"], layers_b=["blocks.1"], metrics=["procrustes"], rows="resized",
                progress=False,
            )  # fmt: skip
            assert found.values["blocks.1"][i, j] == pytest.approx(atlas["procrustes"][0, 0], abs=1e-6)


def test_a_recording_without_a_layer_of_the_first_is_named(tmp_path: Path) -> None:
    model, recorder = net(), DynamicsRecorder(tmp_path, PROBE)
    for step in range(2):
        recorder.measure(adapter(model), step=step)
    (last,) = tmp_path.glob("*1*.safetensors")
    kept = hf_stitch.Activations.load(last)
    layers = dict(kept.values)
    name = next(iter(layers))
    del layers[name]
    hf_stitch.Activations(layers, kept.ids, kept.pooling, kept.mask).save(last)
    with pytest.raises(ValueError, match=f"the recording of step 1 in .* lacks layer {name!r} of step 0"):
        Dynamics.of(tmp_path)


def dynamics(*curve: float, distance: bool = False) -> Dynamics:
    n = len(curve)
    values = np.eye(n)
    values[:, -1] = values[-1] = curve
    return Dynamics({"layer": values}, tuple(range(n)), tuple(map(float, range(n))), "m", not distance, 9, "mean")


@pytest.mark.parametrize(
    ("curve", "threshold", "when"),
    [
        ((0.95, 0.2, 0.92, 0.93, 1), 0.9, 2),  # must stay above the threshold, not only reach it
        ((0.95, 0.96, 1), 0.9, 0),
        ((0.1, 0.2, 1), 0.9, 2),
        ((0.1, 0.2, 1 - 1e-16), 1.0, 2),  # rounding errors at the last moment do not count
        ((0.1, 0.9, 1), 0.9, 1),
    ],
)
def test_settled(curve: tuple[float, ...], threshold: float, when: float) -> None:
    assert dynamics(*curve).settled(threshold) == {"layer": when}
    assert dynamics(*(1 - value for value in curve), distance=True).settled(1 - threshold + 1e-12) == {"layer": when}


def test_dynamics_are_drawn_and_must_fit_together() -> None:
    found = dynamics(0.1, 0.95, 1)
    assert len(found.to_pandas()) == 9 and "settles" in str(found)
    (line,) = found.plot().axes[0].lines
    assert line.get_label() == "layer"
    np.testing.assert_array_equal(line.get_ydata(), [0.1, 0.95, 1])
    with pytest.raises(ValueError, match=r"dynamics of 2 moments require 2 epochs and values of shape \(2, 2\)"):
        Dynamics.from_dict({**found.to_dict(), "steps": [0, 1]})


# -- bad input ---------------------------------------------------------------------------------------------------------
class Made:
    """What callbacks are given in the refusals below."""

    def __init__(self, folder: Path, reference: hf_stitch.Adapter) -> None:
        self.run, self.reference, self.data = trainer(folder), reference, labelled(reference)
        self.own = adapter(self.run.model)
        self.saved = extract_activations(reference, PROBE, layers=["blocks.0"], progress=False)

    def attach(self, reference: Any = "start", *layers: list[str], **options: Any) -> None:
        SimilarityCallback(reference, PROBE, *layers, **options).attach(self.run, self.own)

    def stitchability(self, *pairs: Any, reference: Any = None, data: Any = None) -> None:
        StitchabilityCallback(reference or self.reference, data or self.data, *pairs).measure(adapter(net()), step=0)


def similarity(reference: Any = "start", probe: Any = PROBE, **options: Any) -> SimilarityCallback:
    return SimilarityCallback(reference, probe, **options)


def of_another_network(step: int) -> None:
    (callback := similarity()).measure(adapter(net()), step=0)
    callback.measure(net(1), step=step)


def on_meta() -> None:
    with torch.device("meta"):
        similarity().measure(Net(), step=0)


def attached_twice(made: Made) -> None:
    (callback := similarity()).attach(made.run, made.own)
    callback.attach(made.run, made.own)


def of_texts() -> hf_stitch.Adapter:
    return hf_stitch.load(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)), example_inputs=torch.tensor([[1, 2]]))


REFUSALS: dict[str, Callable[[Made], object]] = {
    "must not be empty": lambda made: similarity(probe=[]),
    "at least 2": lambda made: similarity(probe=images(1)),
    "linear_cka": lambda made: similarity(metrics=["linear_ckaa"]),
    "not layers": lambda made: similarity(metrics=["disagreement"]),
    "every must be": lambda made: similarity(every="epochs"),
    "slashes": lambda made: similarity(name="a/b"),
    "in a different order": lambda made: similarity(
        hf_stitch.Activations(made.saved.values, made.saved.ids[::-1], "mean")
    ),
    "pooling='mean', not 'cls'": lambda made: similarity(made.saved, pooling="cls"),
    r"did you mean 'blocks\.1'": lambda made: made.attach("start", ["block.1"]),
    "must accept the same kind of samples": lambda made: made.attach(of_texts()),
    "is the network in training": lambda made: made.attach(made.own),
    "the model of the trainer": lambda made: similarity().attach(made.run, adapter(net())),
    "example_inputs": lambda made: similarity().attach(made.run),
    "eval_strategy is 'no'": lambda made: made.attach(every="eval"),
    "already attached": attached_twice,
    "another name=": lambda made: [made.attach() for _ in range(2)],
    r"callback\.attach\(trainer\)": lambda made: Trainer(net(), made.run.args, callbacks=[similarity()]),
    "labelled": lambda made: StitchabilityCallback(made.reference, PROBE),
    r"did you mean 'blocks\.1'\?": lambda made: made.stitchability([("blocks.1", "block.1")]),
    "the two networks do not share cut names": lambda made: made.stitchability(reference=adapter(net(4, Other))),
    "label 7": lambda made: made.stitchability(data=hf_stitch.Samples.of(PROBE, label=[7] * 40)),
    "another network": lambda made: of_another_network(1),
    "step must be": lambda made: of_another_network(-1),
    r"sharded .* or on the meta device": lambda made: on_meta(),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_bad_input_is_refused(message: str, tmp_path: Path, reference: hf_stitch.Adapter) -> None:
    made = Made(tmp_path, reference)
    with pytest.raises(ValueError, match=message):
        REFUSALS[message](made)


# -- other ways to train -----------------------------------------------------------------------------------------------
def test_new_model_of_model_init_is_measured(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4
    )
    run = Trainer(
        model_init=lambda: ViTForImageClassification(config),
        args=TrainingArguments(str(tmp_path), use_cpu=True, num_train_epochs=1, report_to=[], disable_tqdm=True),
        train_dataset=[{"pixel_values": torch.randn(3, 8, 8), "labels": i % 2} for i in range(8)],
    )
    callback = SimilarityCallback("start", torch.randn(12, 3, 8, 8)).attach(run)  # transformers models need no adapter
    before = run.model
    run.train()
    assert run.model is not before
    assert [measured.step for measured in callback.history] == [0, 1]
