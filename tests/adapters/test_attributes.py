"""Two objects are alike if their values and the code that they run are, whatever else differs."""

from __future__ import annotations

import copy
import functools
import math
import re
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from hf_stitch.adapters.attributes import Alike, attributes_of

from tiny_networks import network  # isort: skip


def alike(one: Any, two: Any, *networks: nn.Module) -> bool:
    found = Alike(*networks)(one, two)
    assert found == Alike(*networks)(two, one)
    return found


def module(code: str, **given: Any) -> types.ModuleType:
    """Return a module of user code, as an import makes it."""
    made = types.ModuleType("of_a_user")
    vars(made).update(given)
    exec(code, vars(made))
    return made


NET = """
import math
import torch
from torch import nn

SCALE = 2.0

def act(x):
    return torch.tanh(x) * SCALE

class Base(nn.Module):
    def shared(self, x):
        return x + 1

class Net(Base):
    power = 2

    def __init__(self, act=act, bias=0.0):
        super().__init__()
        self.fc, self.act, self.bias = nn.Linear(3, 3), act, bias

    def forward(self, x):
        def inner(y):
            return y * 1.5
        try:
            return self.act(inner(self.shared(self.fc(x)))) ** self.power + self.bias
        except ValueError:
            return x
"""


def net(code: str = NET, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = module(code).Net(**options)
    return made


def test_the_same_code_is_alike_wherever_it_stands() -> None:
    used = net()
    for _ in range(100):  # Python rewrites the code of functions that are called often
        used(torch.ones(1, 3))
    again = net("\n\n# a comment\n" + NET.replace("    def forward", "\n    # another\n    def forward"))
    assert all(alike(used, each) for each in (net(), copy.deepcopy(net()), again))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("SCALE = 2.0", "SCALE = 3.0"),  # a global that a function names
        ("torch.tanh", "torch.sin"),
        ("y * 1.5", "y * 1.6"),  # in a function inside of a method
        ("x + 1", "x + 2"),  # in a base class
        ("x + 1", "x - 1"),
        ("power = 2", "power = 3"),  # of the class
        ("bias=0.0", "bias=0.1"),  # a default, which decides an attribute
        ("except ValueError", "except KeyError"),
        ("return torch.tanh(x) * SCALE", "return math.tau * x"),
    ],
)
def test_code_of_the_user(before: str, after: str) -> None:
    assert before in NET
    assert not alike(net(NET.replace(before, after)), net())


def math_like(x: Any, *, power: int = 2) -> Any:
    return x**power


def closures() -> list[Any]:
    def times(factor: float) -> Callable[[Any], Any]:
        return lambda x: x * factor

    acts = [times(2), times(3), functools.partial(pow, 2), functools.partial(pow, 3), torch.relu, functional.gelu]
    return [net(act=act) for act in (*acts, functional.relu, torch.tanh, math_like)]


def defaults() -> list[Any]:
    def made(factor: float, power: int) -> Callable[..., Any]:
        def act(x: Any, times: float = factor, *, to: int = power) -> Any:
            return times * x**to

        return act

    return [made(*each) for each in ((2.0, 2), (3.0, 2), (2.0, 3))]


def cached() -> list[Any]:
    code = "import functools\n@functools.lru_cache\ndef act(x):\n    return x * {}"
    return [module(code.format(factor)).act for factor in (2, 3)]


def modules() -> list[Any]:
    return [
        nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.LeakyReLU(), nn.LeakyReLU(0.2), nn.LayerNorm(3),
        nn.LayerNorm(3, eps=1e-3), nn.Sequential(nn.ReLU(), nn.GELU()), nn.Sequential(nn.GELU(), nn.ReLU()),
        nn.ModuleList([nn.ReLU()]),
    ]  # fmt: skip


def buffers() -> list[Any]:
    """Return networks with a buffer that a state dict leaves out."""
    two = [nn.Sequential(nn.ReLU()) for _ in range(2)]
    for factor, made in enumerate(two):
        made.register_buffer("scale", factor * torch.ones(2), persistent=False)
    return [*two]


def hooks() -> list[Any]:
    four = [nn.ReLU() for _ in range(4)]
    four[1].register_forward_hook(lambda module, inputs, output: output * 0)
    four[2].register_forward_hook(lambda module, inputs, output: output * 2)
    four[3].register_forward_pre_hook(lambda module, inputs: inputs)
    return [*four]


def parametrized() -> list[Any]:
    class Twice(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    torch.manual_seed(0)
    three = [nn.Linear(2, 2) for _ in range(3)]
    parametrize.register_parametrization(three[1], "weight", Twice())
    parametrizations.weight_norm(three[2])
    return [*three]


def objects() -> list[Any]:
    class Options:
        def __init__(self, value: Any) -> None:
            self.value, self.itself = value, self

    values = [
        1, True, 1.0, "1", None, (1,), [1], {1}, {1: 2}, {2: 1}, torch.ones(1), torch.ones(1).half(),
        torch.zeros(1), torch.ones(1).nan_to_num() * torch.nan, torch.ones(1, device="meta"), b"1",
        re.compile("1"), re.compile("2"), Path("1"), torch.float16, slice(1), slice(2), threading.Lock(),
        iter([1]), {1: 2, 3: 4}, {3: 4, 1: 2}, range(3), Options(1), torch.ones(1).numpy(), torch.Size([1]),
        float("nan"), math, re,
    ]  # fmt: skip
    return [Options(value) for value in values]


KINDS = (closures, defaults, cached, modules, buffers, hooks, parametrized, objects)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_is_like_its_copy_alone(kind: Callable[[], list[Any]]) -> None:
    values, copies = kind(), kind()
    found = {(i, j) for i, one in enumerate(values) for j, two in enumerate(copies) if alike(one, two)}
    assert found == {(i, i) for i in range(len(values))}


def test_patched_methods() -> None:
    patched = nn.Sequential(nn.Linear(2, 2))
    patched[0].forward = lambda x: x
    plain = nn.Sequential(nn.Linear(2, 2))
    assert not alike(patched, plain, patched, plain)


def test_what_decides_no_forward_in_eval_mode_is_left_out() -> None:
    made = network("vit").model
    other = copy.deepcopy(made)
    made.train()
    made.name_or_path = "elsewhere"
    try:
        assert attributes_of(made) and alike(made, other, made, other)
    finally:
        made.eval()
        made.name_or_path = ""


def test_weights_are_left_out_only_where_a_state_dict_has_them() -> None:
    def hidden(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(2, 2))
        made.parts = [nn.Linear(2, 2)]  # in no state dict
        return made

    one, two = hidden(0), hidden(1)
    assert not alike(one, two, one, two)
    two.parts[0].load_state_dict(one.parts[0].state_dict())
    assert alike(one, two, one, two) and not alike(one, two)


def test_a_value_is_not_alike_because_it_was_compared_before() -> None:
    found, (one, two) = Alike(), ([1, [2]], [1, [3]])
    assert not found(one, two) and not found(one, two) and not found(one[1], two[1])
