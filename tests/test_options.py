"""Options of everything public: a wrong value is named before any work."""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from hf_stitch_studies import bench
from torch import nn

import hf_stitch
from hf_stitch.options import Configured, Count, check
from hf_stitch.running import RunOptions

from public import Public, choices, outside, publics  # isort: skip

WRONG = "no such choice"


def _complaint(each: Public, parameter: str) -> str:
    """What is wrong with the answer to a wrong choice; empty if nothing is."""
    try:
        found = each.run(**{parameter: outside(each.annotation(parameter), WRONG)})
    except ValueError as error:
        told = parameter in str(error) and repr(WRONG) in str(error)
        return "" if told else f"ValueError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"it returned {type(found).__name__}"


def test_every_enumerated_option_is_checked_before_any_work() -> None:
    found = {
        f"{each.name}: {parameter}": _complaint(each, parameter)
        for each in publics()
        for parameter in each.parameters
        if choices(each.annotation(parameter))
    }
    assert len(found) > 80
    failed = {name: complaint for name, complaint in found.items() if complaint}
    assert not failed, "\n".join(f"{name}  {why:.150}" for name, why in failed.items())


def _adapter(seed: int = 0) -> hf_stitch.Adapter:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    return hf_stitch.load(net, example_inputs=torch.randn(2, 4))


@pytest.fixture(scope="module")
def verbs() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Name of a verb -> the verb, and a valid call of it."""
    a, b = _adapter(0), _adapter(1)
    data = hf_stitch.Samples.of(torch.randn(60, 4), label=[place % 3 for place in range(60)])
    others = hf_stitch.Samples.of(torch.randn(40, 4), label=[place % 3 for place in range(40)])
    quiet: dict[str, Any] = {"progress": False}
    task: dict[str, Any] = {"task": "image-classification", **quiet}
    places = {"source_layer": "1", "target_layer": "1"}
    model = hf_stitch.stitch(a, b, data, **places, **task)
    grid = {"a": a, "b": b, "data": data, "layers_a": ["1"], "layers_b": ["1"], **task}
    relative = {"encoder": a, "anchors": data.take(20), "layer": "1", "num_labels": 3, **task}
    swapped = {"model": a, "encoder": b, "anchors": data, "encoder_layer": "1", "target_layer": "1", "data": others}
    return {
        "compare": (hf_stitch.compare, {"a": a, "b": b, "data": data, **quiet}),
        "compare_all": (hf_stitch.compare_all, {"networks": [a, b], "data": data, **quiet}),
        "stitch": (hf_stitch.stitch, {"source": a, "target": b, "data": data, **places, **task}),
        "stitch_grid": (hf_stitch.stitch_grid, grid),
        "evaluate": (hf_stitch.evaluate, {"stitched": model, "data": others, **quiet}),
        "audit": (hf_stitch.audit, {"stitched": model, "data": others, **quiet}),
        "relative_model": (hf_stitch.relative_model, relative),
        "swap": (hf_stitch.swap, {**swapped, **task}),
        "bench": (bench, {"networks": [a, b, _adapter(2)], "data": data, "layers": ["1"], "probe_epochs": 1, **quiet}),
    }


class Thing:
    """What no parameter takes."""


def _complaint_of_type(call: Callable[[], Any], parameter: str) -> str:
    try:
        call()
    except (ValueError, TypeError) as error:
        raised = traceback.extract_tb(error.__traceback__)[-1]
        ours = "hf_stitch" in raised.filename and "raise" in (raised.line or "")
        return "" if ours and parameter in str(error) else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it was taken"


def test_every_verb_names_the_parameter_that_has_a_wrong_type(verbs: Any) -> None:
    found = {
        f"{name}: {parameter}": _complaint_of_type(lambda: verb(**{**valid, parameter: Thing()}), parameter)  # noqa: B023
        for name, (verb, valid) in verbs.items()
        for parameter, described in inspect.signature(verb).parameters.items()
        if described.kind is not described.VAR_KEYWORD
    }
    failed = {name: complaint for name, complaint in found.items() if complaint}
    assert not failed, "\n".join(f"{name}  {why:.150}" for name, why in failed.items())


@pytest.mark.parametrize("option", RunOptions.__annotations__)
def test_every_verb_checks_the_options_of_a_run_or_does_not_have_them(verbs: Any, option: str) -> None:
    for verb, valid in verbs.values():
        with pytest.raises(TypeError, match=option):
            verb(**{**valid, option: Thing()})


@pytest.mark.parametrize(
    ("verb", "wrong", "said"),
    [
        ("evaluate", {"resamples": 0}, "resamples must be an integer >= 2, got 0"),
        ("evaluate", {"stitched": 5}, "stitched must be a StitchedModel, got 5"),
        ("audit", {"detectors": []}, "detectors must contain at least one detector"),
        ("audit", {"stitched": 5}, "stitched must be a StitchedModel or a list, got 5"),
        ("bench", {"networks": []}, "networks must contain at least one network"),
        ("compare_all", {"networks": {1: "a"}}, "key 1 of networks must be a text, got 1"),
        ("stitch", {"source_layer": None}, "source_layer must be a text, got None"),
        ("stitch", {"seed": -1}, "seed must be an integer >= 0, got -1"),
        ("stitch_grid", {"seed": "x"}, "seed must be an integer >= 0, got 'x'"),
        ("compare", {"accelerator": 5}, "accelerator must be an accelerate.Accelerator, got 5"),
        ("compare", {"checkpoint_dir": __file__}, "checkpoint_dir must be a folder"),
        ("evaluate", {"batchsize": 5}, "evaluate got an unexpected option 'batchsize'; did you mean 'batch_size'?"),
        ("compare", {"plan": True}, "compare got an unexpected option 'plan'"),
        ("stitch_grid", {"layer_a": ["1"]}, "did you mean 'layers_a'?"),
        ("swap", {"checkpoint_dir": "x"}, "swap got an unexpected option 'checkpoint_dir'"),
        (
            "relative_model",
            {"batchsize": 5},
            "relative_model got an unexpected option 'batchsize'; did you mean 'batch_size'?",
        ),
        (
            "relative_model",
            {"centre": True},
            "relative_model got an unexpected option 'centre'; did you mean 'center'?",
        ),
        ("compare", {"layers_a": [5]}, r"layers_a\[0\] must be a text, got 5"),
    ],
)
def test_what_was_given_by_mistake_is_named(verbs: Any, verb: str, wrong: dict[str, Any], said: str) -> None:
    call, valid = verbs[verb]
    with pytest.raises((ValueError, TypeError), match=said):
        call(**{**valid, **wrong})


@dataclass(frozen=True)
class Several(Configured):
    name: ClassVar[str] = "several"
    counts: tuple[Count, ...] = ()


def test_numbers_of_numpy_become_those_of_python_wherever_they_stand() -> None:
    several = Several(counts=(np.int64(10), np.int64(15)))  # type: ignore[arg-type]
    assert json.loads(json.dumps(several.to_dict()))["counts"] == [10, 15]
    check(Literal["left", "right"], side=np.str_("left"))
    check(Literal[1, 2], axis=np.int64(2))
    with pytest.raises(ValueError, match="axis must be one of 1, 2, got True"):
        check(Literal[1, 2], axis=True)


def test_a_share_of_numpy_is_one() -> None:
    assert len(hf_stitch.Samples.of(torch.randn(10, 4)).split(np.float32(0.2))[1]) == 2  # type: ignore[arg-type]
