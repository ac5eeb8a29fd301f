"""``diff_all`` equals ``diff`` of each pair, runs each network once, and its callback leaves training alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from hf_stitch_testing import check_command
from hf_stitch_versions import DiffCallback, Family, Pair, diff, diff_all
from hf_stitch_versions.changes.family import _divergences
from hf_stitch_versions.cli import diff_all as command
from torch import nn
from transformers import Trainer, TrainingArguments
from typer.testing import CliRunner

import hf_stitch
from hf_stitch import Adapter

from tests.tiny_networks import SIZE, WORDS, adapted, build, network, plain_tokenizer  # isort: skip

TEXTS = [" ".join(WORDS[i : i + 2 + i % 6]) for i in range(40)]
IMAGES = torch.randn(40, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))


def moved(model: nn.Module, size: float, seed: int = 0) -> nn.Module:
    """A copy with noise on its matrices, relative to them."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for value in model.parameters():
        if value.dim() > 1:
            value.data += size * value.data.std() * torch.randn(value.shape, generator=generator)
    return model


def steps(family: str, *sizes: float) -> dict[str, Adapter]:
    """A run, whose first step is a network with large weights: what is small moves its outputs."""
    models = [build(family, 0)]
    for value in models[0].parameters():
        value.data *= 3 if value.dim() > 1 else 1
    for place, size in enumerate(sizes):
        models.append(moved(models[-1], size, place))
    return {f"step {place}": adapted(family, model) for place, model in enumerate(models)}


def compared(networks: Any, data: Any = None, **options: Any) -> Family:
    return diff_all(networks, data, progress=False, **options)


@pytest.fixture(scope="module")
def found() -> Family:
    return compared(steps("bert", 0.01, 0.2, 0.02), TEXTS)


# -- distances --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["bert", "t5", "cnn"])
def test_each_pair_is_what_diff_finds(family: str) -> None:
    networks = steps(family, *((0.05, 0.1) if family == "bert" else (0.1,)))
    data = TEXTS if networks["step 0"].interface.modality == "text" else IMAGES
    found = compared(networks, data, batch_size=16)
    assert [(pair.a, pair.b) for pair in found.pairs] == list(combinations(networks, 2))
    for pair in found.pairs:
        alone = diff(networks[pair.a], networks[pair.b], data, batch_size=16, progress=False)
        assert alone.outputs is not None and pair.forth is not None
        assert (pair.weight_change, pair.cosine) == pytest.approx(
            (alone.weights.change, alone.weights.cosine), rel=1e-12
        )
        assert vars(pair.forth) == pytest.approx(vars(alone.outputs.forth), rel=1e-8)
        assert (pair.agreement is None) == (found.measure != "KL")
        if found.measure == "KL":
            assert pair.back is not None and pair.agreement is not None and alone.outputs.agreement is not None
            assert vars(pair.back) == pytest.approx(vars(alone.outputs.back), rel=1e-8)
            assert vars(pair.agreement) == pytest.approx(vars(alone.outputs.agreement))


def test_networks_without_classes_have_squared_differences_of_one_scale() -> None:
    bodies = {
        name: hf_stitch.load(network.model.bert, processor=plain_tokenizer())
        for name, network in steps("bert", 0.05, 0.1).items()
    }
    found = compared(bodies, TEXTS)
    alone = diff(bodies["step 0"], bodies["step 2"], TEXTS, progress=False)
    assert alone.outputs is not None
    pair = found.between("step 0", "step 2")
    assert found.measure == "squared difference" and pair.agreement is None
    assert pair.forth == pair.back
    assert vars(pair.forth) == pytest.approx(vars(alone.outputs.forth), rel=1e-8)
    assert "squared_difference" in found.to_pandas()


def test_each_network_runs_once_per_batch_and_the_first_once_more() -> None:
    networks, counts = steps("bert", 0.05, 0.1, 0.1), dict[str, int]()
    for name, each in networks.items():
        each.model.register_forward_hook(lambda *_, name=name: counts.update({name: counts.get(name, 0) + 1}))
    compared(networks, TEXTS, batch_size=10)
    # each also twice to verify padding
    assert counts == {"step 0": 2 + 8, "step 1": 2 + 4, "step 2": 2 + 4, "step 3": 2 + 4}


def test_the_null_is_the_first_network_in_bfloat16_and_networks_stay_as_they_are() -> None:
    networks = steps("bert", 0.05)
    before = {name: copy.deepcopy(each.model.state_dict()) for name, each in networks.items()}
    found = compared(networks, TEXTS)
    for name, each in networks.items():
        assert all(torch.equal(value, before[name][key]) for key, value in each.model.state_dict().items())
    rounded = adapted("bert", copy.deepcopy(networks["step 0"].model).bfloat16().float())
    alone = diff(networks["step 0"], rounded, TEXTS, progress=False)
    assert alone.outputs is not None and found.rounding.forth is not None
    assert found.rounding.forth.value == pytest.approx(alone.outputs.forth.value, rel=1e-6) != 0
    assert found.rounding.weight_change == pytest.approx(alone.weights.change, rel=1e-9) != 0
    in_bfloat16 = {"rounded": adapted("bert", copy.deepcopy(rounded.model).bfloat16()), **networks}
    found = compared(in_bfloat16, TEXTS)
    assert found.rounding.weight_change == 0
    assert found.rounding.forth is not None and found.rounding.forth.value < 1e-14


def test_copies_have_no_distance_and_classes_that_are_excluded_one() -> None:
    one = network("bert")
    found = compared({"a": one, "b": one, "c": adapted("bert", copy.deepcopy(one.model))}, TEXTS)
    for pair in found.pairs:
        assert pair.weight_change == 0 and pair.cosine == pytest.approx(1)
        assert pair.forth is not None and pair.forth.value < 1e-14
        assert pair.agreement is not None and pair.agreement.value == 1
    half = torch.tensor([[0.5, 0.5, 0.0]]).double().log()
    part = torch.tensor([[0.25, 0.25, 0.5]]).double().log()
    assert _divergences(torch.stack([half, half, part]))[..., 0].tolist() == pytest.approx(
        np.array([[0, 0, np.log(2)], [0, 0, np.log(2)], [0.5 * (-np.log(2) + 708.4 - np.log(2))] * 2 + [0]]), rel=1e-3
    )


def test_weights_alone_and_networks_with_other_names_and_heads() -> None:
    whole = build("bert", 0)
    body = copy.deepcopy(whole).bert
    networks = {
        "whole": adapted("bert", whole), "moved": adapted("bert", moved(whole, 0.1)),
        "body": hf_stitch.load(body, processor=plain_tokenizer()),
    }  # fmt: skip
    found = compared(networks)
    head = sum(float(value.square().sum()) for value in whole.classifier.parameters())
    size = sum(float(value.square().sum()) for value in whole.parameters())
    assert found.between("whole", "body").weight_change == pytest.approx((head / size) ** 0.5)  # which only one has
    assert found.between("whole", "body").weight_change < found.between("whole", "moved").weight_change
    assert found.n == 0 and found.pairs[0].forth is None and not found.largest
    assert any("2 weights of whole and body count as change" in note for note in found.notes)
    assert "whole and body are nearest of 3" in found.verdict
    assert found.plot().axes and "KL" not in found.to_pandas()


# -- answers ----------------------------------------------------------------------------------------------------------
def by_hand(names: Sequence[str], distances: Mapping[Any, float]) -> Family:
    pairs = tuple(Pair(a, b, value, 1.0) for (a, b), value in distances.items())
    return Family(tuple(names), 0, None, "", "", pairs, Pair(names[0], "bfloat16", 0.0, 1.0), {}, ())


def test_the_tree_is_that_of_a_textbook() -> None:
    """The distances of the 5S ribosomal RNA of five bacteria, whose tree is worked out on paper everywhere."""
    known = {"ab": 17, "ac": 21, "ad": 31, "ae": 23, "bc": 30, "bd": 34, "be": 21, "cd": 28, "ce": 39, "de": 43}
    assert by_hand("abcde", known).tree in {
        f"({one},{two});"
        for left, right in (("a:8.5", "b:8.5"), ("b:8.5", "a:8.5"))
        for abe in (f"(({left},{right}):2.5,e:11):5.5", f"(e:11,({left},{right}):2.5):5.5")
        for cd in ("(c:14,d:14):2.5", "(d:14,c:14):2.5")
        for one, two in ((abe, cd), (cd, abe))
    }


def test_names_are_quoted_in_trees() -> None:
    found = by_hand(("it's", "b-1"), {("it's", "b-1"): 1.0})
    assert sorted(found.tree[1:-2].split(",")) == ["'b-1':0.5", "'it''s':0.5"]


def test_the_largest_step_and_the_nearest_pair_are_told(found: Family) -> None:
    assert "step 0 and step 1 are nearest of 4" in found.verdict
    assert "The largest step is from step 1 to step 2: KL" in found.verdict
    assert found.largest == {"step 1": 0.0, "step 2": 1.0, "step 3": 0.0}
    assert list(found.curve) == ["step 1", "step 2", "step 3"]
    first, previous = found.curve["step 3"]
    assert (first.a, first.b, previous.a, previous.b) == ("step 0", "step 3", "step 2", "step 3")
    assert found.between("step 3", "step 2") is previous
    assert first.forth is not None and first.forth.low < first.forth.value < first.forth.high
    with pytest.raises(KeyError, match=r"'step 0' and 'step 9' must be two of the networks: step 0, "):
        found.between("step 0", "step 9")


def test_two_equal_steps_share_the_resamples() -> None:
    networks = steps("bert", 0.1)
    back_and_forth = zip("abcd", [networks["step 0"], networks["step 1"]] * 2, strict=True)
    found = compared(dict(back_and_forth), TEXTS)
    assert sum(found.largest.values()) == pytest.approx(1)
    assert found.pairs[0].forth is not None and found.between("c", "d").forth is not None
    assert vars(found.pairs[0].forth) == pytest.approx(vars(found.between("c", "d").forth))


def test_it_is_saved_shown_drawn_and_written_as_a_page(found: Family, tmp_path: Path) -> None:
    found.save(tmp_path / "family.json")
    again = Family.load(tmp_path / "family.json")
    assert again == Family.from_dict(json.loads(json.dumps(found.to_dict()))) and str(again) == str(found)
    assert again.tree == json.loads((tmp_path / "family.json").read_text())["tree"]
    assert found.rows[-1][0] == "step 0 in bfloat16" and "KL from the previous" in found.columns
    frame = found.to_pandas()
    assert len(frame) == 7 and list(frame["b"])[-1] == "bfloat16"
    assert frame["KL_low"].le(frame["KL"]).all() and frame["KL"].le(frame["KL_high"]).all()
    figure = found.plot()
    leaves = [tick.get_text() for tick in figure.subfigs[0].axes[0].get_xticklabels()]
    assert {frozenset(leaves[:2]), frozenset(leaves[2:])} == {
        frozenset(("step 0", "step 1")), frozenset(("step 2", "step 3"))
    }  # fmt: skip
    found.to_html(tmp_path / "family.html")
    page = (tmp_path / "family.html").read_text()
    assert "How far apart are 4 versions of a network?" in page and "The largest step is from step 1" in page


def test_few_samples_have_no_intervals() -> None:
    found = compared(steps("bert", 0.1), TEXTS[:5])
    assert found.pairs[0].forth is not None and np.isnan(found.pairs[0].forth.low)
    assert not found.largest and any("at least 20 samples, got 5" in note for note in found.notes)
    assert Family.from_dict(found.to_dict()).networks == found.networks


def test_other_inputs_are_told() -> None:
    one, two = steps("gpt2", 0.1).values()  # a classifier that reads the first token is never padded on the left
    left = plain_tokenizer()
    left.padding_side = "left"
    found = compared({"a": one, "b": two, "c": hf_stitch.load(two.model, processor=left)}, TEXTS)
    assert found.notes == ("c runs on the inputs of a; its own differ: padding is on the opposite side",)
    assert found.between("b", "c").forth is not None and found.between("b", "c").forth.value < 1e-14


def not_finite() -> Adapter:
    broken = copy.deepcopy(network("bert").model)
    broken.bert.encoder.layer[0].output.dense.weight.data[0, 0] = torch.nan
    return adapted("bert", broken)


def wider() -> Adapter:
    model = copy.deepcopy(network("bert").model)
    model.classifier = nn.Linear(model.classifier.in_features, 7)
    return adapted("bert", model)


REFUSED: dict[str, tuple[Callable[[], Adapter] | None, Any, str]] = {
    "one network": (None, None, "at least two networks, got 1"),
    "another architecture": (lambda: network("gpt2"), None, "expected versions of one network"),
    "weights that are not finite": (
        not_finite,
        None,
        r"layer\.0\.output\.dense\.weight of b contains values that are not finite",
    ),
    "other classes": (wider, TEXTS, r"outputs of a and b must .* got the shapes \(40, 3\) and \(40, 7\)"),
}
"""What the second network is -> what makes it, the data, and the message."""


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_compared_is_refused(what: str) -> None:
    make, data, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        compared({"a": network("bert"), **({} if make is None else {"b": make()})}, data)


# -- training ---------------------------------------------------------------------------------------------------------
def trainer(folder: Path, model: Any = None, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    options = {
        "num_train_epochs": 2, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "report_to": [], "seed": 3,
        "use_cpu": True, "disable_tqdm": True, "logging_steps": 2, "save_strategy": "no", "eval_strategy": "epoch",
    }  # fmt: skip
    tokenizer = plain_tokenizer()
    data = [{**tokenizer(text), "labels": i % 3} for i, text in enumerate(TEXTS)]
    arguments_ = TrainingArguments(output_dir=str(folder), **{**options, **arguments})
    model = build("bert", 0).train() if model is None else model
    return Trainer(
        model=model, args=arguments_, train_dataset=data, eval_dataset=data[:8], processing_class=tokenizer
    )  # fmt: skip


def logged(run: Trainer, prefix: str) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for entry in run.state.log_history:
        if some := {key: value for key, value in entry.items() if key.startswith(prefix)}:
            found.setdefault(entry["step"], {}).update(some)
    return found


def losses(run: Trainer) -> list[float]:
    return [entry[key] for entry in run.state.log_history for key in ("loss", "eval_loss") if key in entry]


def test_training_is_the_same_with_the_callback_and_its_values_those_of_diff(tmp_path: Path) -> None:
    (plain := trainer(tmp_path / "plain")).train()
    watched = trainer(tmp_path / "watched")
    start = adapted("bert", copy.deepcopy(watched.model))
    callback = DiffCallback(TEXTS).attach(watched)
    watched.train()
    assert losses(plain) == losses(watched) and len(losses(plain)) == 7
    for one, two in zip(plain.model.state_dict().values(), watched.model.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    values = logged(watched, "diff/")
    assert list(values) == [5, 10] and len(values[10]) == 3
    assert watched.evaluate()["eval_diff/KL"] == values[10]["diff/KL"]  # the weights count as those that were measured
    assert len(callback.history) == 3
    alone = diff(start, adapted("bert", watched.model), TEXTS, progress=False)
    assert alone.outputs is not None and alone.outputs.agreement is not None
    assert values[10] == pytest.approx({
        "diff/KL": alone.outputs.forth.value, "diff/agreement": alone.outputs.agreement.value,
        "diff/weight_change": alone.weights.change,
    }, rel=1e-6)  # fmt: skip
    family = Family.load(tmp_path / "watched" / "diff.json")
    assert callback.family == family and family.networks == ("0", "5", "10")
    whole = family.between("0", "10")
    assert whole.forth is not None and whole.forth.value == pytest.approx(values[10]["diff/KL"], rel=1e-9)
    assert family.between("5", "10").weight_change > 0


def test_a_resumed_run_goes_on_from_the_start(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", save_strategy="epoch")
    DiffCallback(TEXTS).attach(whole)
    whole.train()
    again = trainer(tmp_path / "again")
    callback = DiffCallback(TEXTS).attach(again)
    again.args.resume_from_checkpoint = str(tmp_path / "whole" / "checkpoint-5")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert logged(again, "diff/")[10] == pytest.approx(logged(whole, "diff/")[10])
    assert callback.family is not None and callback.family.networks == ("0", "10")
    (tmp_path / "whole" / "checkpoint-5" / "diff-start.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"cannot resume from step 5, because the checkpoint lacks the weights of the start"
    ):
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads what transformers has renamed
def test_of_an_adapter_only_its_weights_are_kept(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("bert", 0), peft.LoraConfig(target_modules=["query"], task_type="SEQ_CLS"))
    callback = DiffCallback(TEXTS, every=10).attach(run := trainer(tmp_path, model))
    run.train()
    kept = list(callback._changed[10])
    assert kept and all("lora" in name or "classifier" in name for name in kept)
    merged = adapted("bert", copy.deepcopy(run.model).merge_and_unload())
    assert logged(run, "diff/")[10]["diff/weight_change"] == pytest.approx(
        diff(network("bert"), merged, progress=False).weights.change, rel=1e-5
    )


def test_a_loop_of_ones_own_measures_and_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    own, callback = adapted("bert", build("bert", 0)), DiffCallback(TEXTS, name="moved")
    assert callback.measure(own, step=0) == {}
    with pytest.raises(ValueError, match=r"moved requires at least two measured steps, got 1"):
        callback.to_family()
    for value in own.model.parameters():
        value.data *= 1.01
    assert callback.measure(own, step=3)["moved/weight_change"] == pytest.approx(0.01, rel=1e-4)
    preprocess, drawn = own.preprocess, list[Any]()
    monkeypatch.setattr(own, "preprocess", lambda samples: drawn.append(torch.rand(1)) or preprocess(samples))
    before = torch.get_rng_state(), {name: value.clone() for name, value in own.model.state_dict().items()}
    own.model.train()
    assert callback.to_family().networks == ("0", "3") and drawn
    assert torch.equal(torch.get_rng_state(), before[0]) and own.model.training
    assert all(torch.equal(value, before[1][name]) for name, value in own.model.state_dict().items())
    assert callback.family is None


def test_weights_are_told_apart_where_casts_are_kept() -> None:
    own, callback = adapted("bert", build("bert", 0)), DiffCallback(TEXTS)
    callback.measure(own, step=0)
    for value in own.model.parameters():
        value.data *= 2
    alone = callback.measure(own, step=1)["diff/KL"]
    with torch.autocast("cpu", torch.bfloat16):
        assert callback.measure(own, step=2)["diff/KL"] == pytest.approx(alone, rel=0.1) != 0
        pair = callback.to_family().between("0", "1")
    assert pair.forth is not None and pair.forth.value == pytest.approx(alone, rel=0.1)


# -- command ----------------------------------------------------------------------------------------------------------
def test_the_command_compares_all_networks_and_refuses_unnamed_ones(code: Path, tmp_path: Path) -> None:
    given = [f"base={code}:net", f"copy={code}:net", f"tuned={code}:tuned"]
    check_command(command, *given)
    app = typer.Typer()
    app.command()(command)
    page = tmp_path / "page.html"
    data = ["--data", "sklearn:digits", "--split", "test", "--max-samples", "40", "--report", str(page)]
    found = CliRunner().invoke(app, [*given, *data])
    assert found.exit_code == 0 and "base and copy are nearest of 3" in " ".join(found.output.split()), found.output
    assert "versions of a network?" in page.read_text()
    wrong = CliRunner().invoke(app, [*given, f"{code}:net"])
    assert wrong.exit_code == 2 and "expected NAME=NETWORK" in wrong.output


SCRIPT = """
import runpy, sys
import torch, hf_stitch
from hf_stitch_versions import diff_all

nets = runpy.run_path(sys.argv[1])
data = hf_stitch.data.read_data("sklearn:digits", split="test")
networks = {name: hf_stitch.load(nets[name]()[0], processor=nets[name]()[1], example_inputs=torch.randn(2, 1, 8, 8))
            for name in ("net", "tuned")}
found = diff_all(networks, data, batch_size=40, progress=False)
print(found.verdict, found.largest, flush=True)
"""


def test_two_processes_find_what_one_does(code: Path, alone_and_launched: Callable[..., str]) -> None:
    alone_and_launched(SCRIPT, code)
