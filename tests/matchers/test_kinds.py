"""Kinds of matchers: a new one works in every job, and no job knows the kinds, nor compares tasks by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_stitch
from hf_stitch.data import PairedSamples
from hf_stitch.matchers import Matched, Matcher, UnpairedMatcher, match_each
from hf_stitch.matchers.regression import Lstsq
from hf_stitch.pairs import Collected, CollectedPair, Pair
from hf_stitch.pairs.collected import CollectedParts
from hf_stitch.registry import Entry, registries
from hf_stitch.representation import RepresentationSpec
from hf_stitch.running import Run
from hf_stitch.statistics import Features, Moments
from hf_stitch.stitches import IdentityStitch, LinearStitch

KINDS = {"ClosedFormMatcher", "RowsMatcher", "TrainedMatcher", "UnpairedMatcher"}
CUT: dict[str, Any] = {"task": "image-classification", "progress": False}


@dataclass(frozen=True)
class Descent(Matcher):
    """An affine map by one pass of gradient descent, which needs neither moments nor all rows at once."""

    name, title = "descent", "one pass of gradient descent"
    rate: float = 0.5

    def match(self, collected: Collected, folder: Path | None = None) -> Matched:
        return match_each(collected, lambda cell: {"body": collected.batches(cell)}, self.descend)

    def descend(self, batches: Iterator[dict[str, tuple[Tensor, Tensor]]]) -> tuple[LinearStitch, Tensor]:
        weight, n, total, errors, differ = None, 0, 0, 0, set()
        for rows in batches:
            x, y = rows["body"]
            if weight is None:
                weight, bias = x.new_zeros(y.shape[1], x.shape[1]), y.mean(0)
            error = y - x @ weight.T - bias
            weight = weight + self.rate / (x.square().sum(1).mean() + 1) * error.T @ x / len(x)
            n, total, errors = n + len(x), total + y.sum(0), errors + error.square().sum()
            differ |= {side for side, of in (("x", x), ("y", y)) if bool((of != of[:1]).any())}
        if len(differ) < 2:
            raise ValueError("descent needs rows that differ on both sides")
        stitch = LinearStitch.of(weight=weight, bias=bias)
        stitch.fitted = {"n": n, "r2": float(1 - errors / n)}
        return stitch, total / n


@dataclass(frozen=True)
class Unfitted(UnpairedMatcher):
    """Takes rows with and without partners, and reads none of them."""

    name, title, least_pairs = "unfitted", "nothing is fitted", 1

    def fit(self, x: Tensor, y: Tensor, *_: Any, **unpaired: Any) -> IdentityStitch:
        return IdentityStitch(x.shape[1], y.shape[1])


@pytest.fixture
def descent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registries.matchers._entries, "descent", Entry.of("descent", Descent))


def networks() -> tuple[hf_stitch.Adapter, hf_stitch.Adapter]:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in "ab"]
    a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
    return a, b


def data(n: int = 120, seed: int = 0) -> hf_stitch.Samples:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return hf_stitch.Samples.of(x, label=[place % 3 for place in range(n)])


def test_a_new_kind_works_in_every_job(descent: None, tmp_path: Path) -> None:
    (a, b), samples = networks(), data()
    cut = {"source_layer": "1", "target_layer": "3"}
    stitched = hf_stitch.stitch(a, b, samples, **cut, matcher="descent", rate=0.3, batch_size=16, **CUT)
    assert stitched.stitch.body.fitted["n"] == 96 and stitched.stitch.widths == (8, 6)
    assert stitched.config.recipe["matcher"] == {"name": "descent", "rate": 0.3} and stitched.evaluation is not None
    layers: dict[str, Any] = {"layers_a": ["1", "3"], "layers_b": ["1", "3"], "matchers": [Descent(0.3), "lstsq"]}
    grid = hf_stitch.stitch_grid(a, b, samples, **layers, batch_size=16, resamples=5, checkpoint_dir=tmp_path, **CUT)
    assert not grid.undefined
    assert torch.equal(grid.stitches["descent(rate=0.3)", "1", "3"].body.weight, stitched.stitch.body.weight)
    swapped = {"encoder_layer": "3", "target_layer": "3", "baselines": []}
    new = hf_stitch.swap(a, b, data(40, seed=1), matcher="descent", **swapped, **CUT)
    assert new.stitch.body.fitted["n"] == 40
    for job, more in ((hf_stitch.stitch, {"matcher": "descent"}), (hf_stitch.stitch_grid, {"matchers": ["descent"]})):
        plan = hf_stitch.plan(job, a, b, samples, **more, **CUT)
        assert plan.seconds > 0 and plan.fits


@pytest.mark.parametrize("matcher", ["ridge", "piecewise", {"name": "task_loss", "max_steps": 1}], ids=str)
def test_each_kind_keeps_the_mean_of_the_target_for_the_mean_baseline(matcher: Any) -> None:
    a, b = networks()
    pair, samples = Pair(a, b, task=CUT["task"]).at([("1", "3")]), PairedSamples.of(data(40))
    layer = registries.matchers.build(matcher).match(CollectedPair(pair, samples, Run(16, progress=False))).only
    read = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    mean = b.encode(read, "3")["3"].values.mean(0)
    torch.testing.assert_close(layer.mean_only()(a.encode(read[:5], "1")["1"]).values, mean.expand(5, -1))


def test_the_mean_of_the_target_is_also_that_of_its_rows_without_partners(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, u, v = (torch.randn(20, 3) + shift for shift in range(4))
    spec = RepresentationSpec("bd", 3)
    collected = CollectedParts(spec, spec, "none", {"body": Features().update(x, y)})
    monkeypatch.setattr(collected, "unpaired", lambda cell: {"body": (u, v)})
    torch.testing.assert_close(Unfitted().match(collected).only.body_mean, torch.cat([y, v]).mean(0))


def test_the_baseline_of_own_tokens_is_fitted_to_them_alone() -> None:
    x, y = torch.randn(60, 6), torch.randn(60, 3)
    specs = RepresentationSpec("bd", 6), RepresentationSpec("bd", 3)
    collected: Any = CollectedParts(*specs, "none", {"body": Moments(6, 3).update(x, y)})
    collected.pair = SimpleNamespace(source=SimpleNamespace(embedding_width=2))
    own = Lstsq().baselines(collected, Lstsq().match(collected).only)["own"].body
    torch.testing.assert_close(own(x), Lstsq().fit(Moments(2, 3).update(x[:, 4:], y))(x[:, 4:]))


def test_a_grid_of_one_pair_of_layers_takes_matchers_of_rows() -> None:
    a, b = networks()
    cell: dict[str, Any] = {"layers_a": ["1"], "layers_b": ["3"], "resamples": 5}
    assert not hf_stitch.stitch_grid(a, b, data(), matchers=["retrieval"], **cell, **CUT).undefined


def test_a_swap_does_not_train() -> None:
    a, b = networks()
    with pytest.raises(ValueError, match="a swap has only vectors"):
        hf_stitch.swap(a, b, data(40), encoder_layer="3", target_layer="3", matcher="task_loss", **CUT)


def test_no_job_knows_the_kinds_nor_compares_a_task_with_a_string() -> None:
    package = Path(hf_stitch.__file__).parent
    for path in (*package.glob("workflows/**/*.py"), *package.glob("analysis/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = {getattr(node, "id", None), getattr(node, "name", None)} & KINDS
            assert not names, f"{path} names {names}"
            if isinstance(node, ast.Compare):
                compared = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                compared |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                found = compared & {*registries.tasks}
                assert not found, f"{path}, line {node.lineno}, compares {found}: ask task_named(…)"


def test_a_job_that_trains_copies_each_network_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (a, b), copied = networks(), []
    for half in ("front", "back"):
        original = getattr(hf_stitch.Adapter, half)
        monkeypatch.setattr(
            hf_stitch.Adapter,
            half,
            lambda *given, half=half, original=original: copied.append(half) or original(*given),
        )
    training = {"name": "task_loss", "epochs": 1, "batch_size": 32}
    hf_stitch.stitch(a, b, data(), source_layer="1", target_layer="3", matcher=training, **CUT)
    assert copied == ["front", "back"]
