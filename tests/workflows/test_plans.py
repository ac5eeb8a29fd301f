"""Plans: what a job will cost, without doing it; and refusal of what does not fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from processes import run_ranks
from tiny_networks import adapted, build, network
from torch import Tensor, nn

import hf_stitch
from hf_stitch import resources
from hf_stitch.analysis import Plan, extract_activations
from hf_stitch.data import PairedSamples
from hf_stitch.pairs import CollectedPair, Pair
from hf_stitch.pairs.moments import PairMoments
from hf_stitch.reference import weights_hash
from hf_stitch.workflows import _plan


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(120, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def stitched(images: Tensor) -> hf_stitch.StitchedModel:
    return hf_stitch.stitch(network("cnn"), network("cnn", 1), images[:60], progress=False)


SWAPPED: Any = {"encoder_layer": "layer1.0", "target_layer": "layer1.0"}
JOBS: dict[str, Callable[[Any, Any, Tensor], Plan]] = {
    "compare": lambda plan, model, x: plan(hf_stitch.compare, network("cnn"), network("cnn", 1), x),
    "compare_all": lambda plan, model, x: plan(hf_stitch.compare_all, [network("cnn"), network("cnn", 1)], x),
    "stitch": lambda plan, model, x: plan(hf_stitch.stitch, network("cnn"), network("cnn", 1), x),
    "stitch_grid": lambda plan, model, x: plan(hf_stitch.stitch_grid, network("cnn"), network("cnn", 1), x),
    "evaluate": lambda plan, model, x: plan(hf_stitch.evaluate, model, x[60:]),
    "audit": lambda plan, model, x: plan(hf_stitch.audit, model, x[60:]),
    "extract_activations": lambda plan, model, x: plan(extract_activations, network("cnn"), x),
    "relative_model": lambda plan, model, x: plan(
        hf_stitch.relative_model, network("cnn"), x[:20], layer="layer1.0", num_labels=3
    ),
    "swap": lambda plan, model, x: plan(hf_stitch.swap, network("cnn"), network("cnn", 1), x[:20], **SWAPPED),
    "swap, relative": lambda plan, model, x: plan(
        hf_stitch.swap,
        hf_stitch.relative_model(network("cnn"), x[:20], layer="layer1.0", num_labels=3, progress=False),
        network("cnn", 1), x[:20], encoder_layer="layer1.0", data=hf_stitch.Samples.of(x[60:], label=[0, 1, 2] * 20),
    ),
}  # fmt: skip


@pytest.mark.parametrize("job", JOBS)
def test_every_long_job_has_a_plan(job: str, stitched: hf_stitch.StitchedModel, images: Tensor) -> None:
    before = weights_hash(stitched), dict(stitched.config.recipe)
    random = torch.random.get_rng_state()
    plan = JOBS[job](partial(hf_stitch.plan, batch_size=16), stitched, images)
    assert torch.equal(random, torch.random.get_rng_state()) or job == "swap, relative"  # whose head is new
    assert isinstance(plan, Plan) and plan.fits and plan.seconds > 0
    assert plan.memory["networks"] > 0 and plan.free_memory > 0 < plan.free_disk
    assert type(plan).from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert {"seconds", "memory"} <= set(plan.to_pandas().kind)
    assert "are free" in " ".join(str(plan).split())
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1, got 0"):
        JOBS[job](partial(hf_stitch.plan, batch_size=0), stitched, images)
    assert (weights_hash(stitched), dict(stitched.config.recipe)) == before


def test_the_plan_of_a_swap_reads_one_batch_of_the_anchors(images: Tensor) -> None:
    swapping = hf_stitch.swap, network("cnn"), network("cnn", 1), images
    plan = hf_stitch.plan(*swapping, data=images[:30], batch_size=8, **SWAPPED)
    assert set(plan.stages) == {"encoding anchors", "fitting", "scoring"}
    alone = hf_stitch.plan(*swapping, batch_size=8, **SWAPPED)
    assert set(alone.stages) == {"encoding anchors", "fitting"}


OWN = transformers.LlamaConfig(architectures=["MyLlama"])
NAMED = {"data": None, "a": OWN, "b": OWN}


@pytest.mark.parametrize(
    ("job", "options", "kind", "message"),
    [
        (hf_stitch.load, {}, TypeError, r"job must be one of .*hf_stitch.stitch_grid.*, got .*load"),
        (hf_stitch.compare, {**NAMED, "a": 3}, TypeError, "a network must be a name, a config of transformers"),
        (hf_stitch.compare, {**NAMED, "bacth_size": 8}, TypeError, "compare got an unexpected option 'bacth_size'"),
        (hf_stitch.compare, NAMED, ValueError, "the config names MyLlama, which is not a class of transformers"),
        (hf_stitch.evaluate, {"stitched": None, "data": None}, ValueError, "evaluate without data requires networks"),
    ],
)  # fmt: skip
def test_what_has_no_plan_is_named(job: Any, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        hf_stitch.plan(job, **options)


def test_statistics_take_the_planned_memory(images: Tensor) -> None:
    a, b = network("cnn"), network("cnn", 1)
    pair = (a.layers[1], b.layers[2])
    layers: Any = {"source_layer": pair[0], "target_layer": pair[1]}
    plan = hf_stitch.plan(hf_stitch.stitch, a, b, images, test_size=20, **layers)
    moments = PairMoments([pair])
    x, y = ({layer: each.encode(images, layer)[layer]} for each, layer in zip((a, b), pair, strict=True))
    state = moments.update(x, y).state_dict()  # rows that wait until they are many enough are left out
    assert plan.memory["moments"] == sum(each.nbytes for key, each in state.items() if not key.endswith("pending"))
    by_rows = hf_stitch.plan(hf_stitch.stitch, a, b, images, test_size=20, matcher="retrieval", **layers)
    rows = CollectedPair(Pair(a, b).at([pair]), PairedSamples.of(images[:100])).rows(pair)
    assert by_rows.memory["rows"] == sum(features.x.nbytes + features.y.nbytes for features in rows.values())


class Deaf(nn.Module):
    """Counts its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(6, 5), nn.Linear(5, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.second(torch.relu(self.first(x)))


def test_what_does_not_fit_is_refused_before_the_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Deaf()
    adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 6))
    cuts: Any = {"source_layer": "first", "target_layer": "first"}
    data = torch.randn(5000, 6)
    assert adapter.layers
    monkeypatch.setattr(resources, "free_memory", lambda device: 100)
    net.seen = 0
    with pytest.raises(ValueError, match=r"moments of layers up to 'first' \(width 5\) .* take 600 B of memory, but"):
        hf_stitch.stitch(adapter, adapter, data, **cuts)
    with pytest.raises(ValueError, match="the rows of all samples take 160 kB of memory, but 100 B are free"):
        hf_stitch.stitch(adapter, adapter, data, matcher="retrieval", **cuts)
    with pytest.raises(ValueError, match=r"the activations of 2 layers on 5,000 samples take 140 kB of memory, but"):
        extract_activations(adapter, data, layers=["first", "second"])
    assert net.seen < 500
    by_rows = hf_stitch.plan(hf_stitch.stitch, adapter, adapter, data, matcher="retrieval", **cuts)  # collects none
    assert "moments" not in by_rows.memory and by_rows.memory["rows"] > 0


def test_a_comparison_without_a_route_does_not_fit(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_stitch.analysis.comparison.comparing.free_memory", lambda device: 200_000)
    both = network("cnn"), network("cnn", 1)
    plan = hf_stitch.plan(hf_stitch.compare, *both, images)  # a route may use half of the memory
    assert not plan.fits and "DOES NOT FIT" in str(plan)
    assert 100_000 < plan.memory["moments"] < 200_000
    with pytest.raises(ValueError, match="linear_cka does not fit into memory"):
        hf_stitch.compare(*both, images, progress=False)


def test_rows_of_a_test_take_disk(images: Tensor) -> None:
    a, b = network("cnn"), network("cnn", 1)
    widths = {layer: extract_activations(a, images[:2], progress=False).values[layer].shape[1] for layer in a.layers}
    rows = 4 * len(images) * 2 * sum(widths.values())
    tested = hf_stitch.plan(hf_stitch.compare, a, b, images, permutations=20)
    assert dict(tested.disk) == {"rows of the test": rows} and not tested.left_out
    resampled = hf_stitch.plan(hf_stitch.compare_all, [a, b], images, resamples=20)
    assert dict(resampled.disk) == {"rows of the test": rows} and "resamples" in resampled.left_out
    assert not hf_stitch.plan(hf_stitch.compare_all, [a, b], images).disk


def plan_of_a_rank(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    a, b = (hf_stitch.load(Deaf(), example_inputs=torch.randn(2, 6)) for _ in "ab")
    x = torch.rand(60, 6)
    plans = {
        "compare": hf_stitch.plan(hf_stitch.compare, a, b, x),
        "stitch": hf_stitch.plan(hf_stitch.stitch, a, b, x, batch_size=8),
        "stitch_grid": hf_stitch.plan(hf_stitch.stitch_grid, a, b, x, batch_size=8, task="image-classification"),
    }
    found = {name: (plan.processes, dict(plan.memory), plan.fits) for name, plan in plans.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def test_all_processes_plan_the_same(tmp_path: Path) -> None:
    run_ranks(2, plan_of_a_rank, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second and all(found[0] == 2 for found in first.values())


# -- without data ------------------------------------------------------------------------------------------------------
def test_without_data_a_plan_is_computed_from_configs(tmp_path: Path) -> None:
    text = transformers.LlamaConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=40, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    text.save_pretrained(tmp_path)  # a config alone, without weights
    found = hf_stitch.plan(hf_stitch.stitch, text, tmp_path, None, source_layer="model.layers.0")
    per_token = 3 * (4 * 32 * 32 + 3 * 32 * 48) + 32 * 90
    flops = 2 * 40 * per_token + 3 * 4 * 40 * 40 * 32  # matrices, and attention to all 40 positions
    seconds = [*found.stages.values()]
    assert [*found.stages] == ["1000 samples through source", "1000 samples through target"]
    assert seconds[0] == seconds[1] and found.computed and "computed" in found.left_out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plan, "speed", lambda dtype: 1e9)
        (exact, _) = hf_stitch.plan(hf_stitch.compare, text, tmp_path, None).stages.values()
    assert exact == pytest.approx(1000 * flops / 1e9, rel=1e-6)
    weights = 2 * 90 * 32 + 3 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
    assert found.memory["networks"] - 2 * 4 * weights == pytest.approx(0, abs=200)  # and the frequencies of positions
    assert found.memory["largest output"] == 64 * 40 * 90 * 4


def test_equal_blocks_run_once_and_a_plan_is_for_devices_that_are_not_here() -> None:
    """A pair of 70B: operations of 80 equal blocks are 80 times those of one, whatever the rest takes."""
    shapes: dict[str, Any] = {
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
        "vocab_size": 128256, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    seconds = {}
    for layers in (1, 2, 80):
        pair = [transformers.LlamaConfig(**shapes, num_hidden_layers=layers) for _ in range(2)]
        found = hf_stitch.plan(hf_stitch.compare, *pair, None)
        device = found.on("GPU", memory=80e9, speed=1e15)
        seconds[layers] = device.seconds
    assert seconds[80] == pytest.approx(seconds[1] + 79 * (seconds[2] - seconds[1]), rel=1e-9)
    assert device.memory["networks"] == pytest.approx(2 * 2 * 70.55e9, rel=1e-3)
    assert device.memory["statistics"] == 8 * 1000**2 * 161
    spread = device.memory["networks"] + device.memory["statistics"]
    room = 80e9 - device.memory["largest output"]
    assert (device.devices - 1) * room < spread <= device.devices * room and device.fits and "GPU" in device.job
    for plan, memory in ((found, 1e9), (Plan("stitch", {"fitting": 1.0}, {}, {}, 1, 1), 80e9)):
        with pytest.raises(ValueError, match="requires a plan without data"):
            plan.on("GPU", memory, 1e15)


def test_blocks_that_look_equal_are_told_apart_by_their_weights_and_may_return_nothing() -> None:
    class Block(nn.Module):
        def __init__(self, width: int, out: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, out))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    class Watched(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            for block in self[:3]:
                input = block(input)
            assert self[3](input) is None and self[4](input) is None
            return input

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    net = Watched(Block(8, 8), Block(8, 16), Block(16, 8), Nothing(), Nothing())
    own = hf_stitch.load(nn.Sequential(net, nn.Linear(8, 2)), example_inputs=torch.randn(2, 8))
    with _plan.weightless():
        flops, largest, widths = _plan._cost(own)
    assert flops == 2 * (8 * 8 + 8 * 16 + 16 * 8 + 8 * 2) and largest == 4 * 16 and widths == [8, 16, 8]


def test_a_computed_plan_takes_no_memory_and_names_networks_that_it_cannot_read() -> None:
    large = transformers.LlamaConfig(architectures=["LlamaForCausalLM"])
    found = hf_stitch.plan(hf_stitch.compare_all, {"small": network("cnn"), "large": large}, data=None)
    assert [*found.stages] == ["1000 samples through small", "1000 samples through large"]
    assert found.memory["networks"] > 6.7e9 * 4
    assert dataclasses.replace(found, free_memory=35 * 10**9).fits
    assert not dataclasses.replace(found, free_memory=26 * 10**9).fits  # the networks are not in memory yet
    timm = hf_stitch.plan(extract_activations, "timm:resnet18", None)
    assert timm.memory["networks"] == pytest.approx(11.7e6 * 4, rel=0.01)


def test_a_computed_plan_takes_the_options_of_the_job_and_leaves_live_networks_as_they_are() -> None:
    net = adapted("cnn", build("cnn", 0))
    net.model.train()
    before, size = weights_hash(net.model), {}
    for batch in (8, 64):
        size[batch] = hf_stitch.plan(hf_stitch.stitch, net, net, None, batch_size=batch).memory["largest output"]
    assert size[64] == 8 * size[8] and weights_hash(net.model) == before and net.model.training


def test_a_computed_plan_leaves_buffers_that_a_forward_changes_and_counts_a_network_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 2**22), nn.Linear(8, 2)
            self.register_buffer("mean", torch.ones(1))

        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            self.mean.mul_(0.9).add_(h.mean().reshape(1) * 0.1)
            return self.last(h[:, :8] - self.mean)

    net = hf_stitch.load(Counting().eval(), example_inputs=torch.randn(2, 4))
    before = net.model.mean.clone()
    found = hf_stitch.plan(hf_stitch.stitch, net, net, None)
    assert torch.equal(net.model.mean, before)
    assert found.memory["networks"] == sum(each.nbytes for each in net.model.state_dict().values())
