"""The hash of an object changes with its values and with the code that it runs, and with nothing else."""

from __future__ import annotations

import copy
import functools
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from hf_stitch.adapters.pins import Pins

from tiny_networks import network  # isort: skip


def pin(value: Any) -> str:
    return Pins().hash(value)


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


def test_the_same_code_has_the_same_hash_wherever_it_stands() -> None:
    used = net()
    before = pin(used)
    for _ in range(100):  # Python rewrites the code of functions that are called often
        used(torch.ones(1, 3))
    assert before == pin(used) == pin(net()) == pin(copy.deepcopy(net()))
    assert pin(net("\n\n# a comment\n" + NET.replace("    def forward", "\n    # another\n    def forward"))) == pin(
        net()
    )


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
    assert pin(net(NET.replace(before, after))) != pin(net())


def test_functions_and_their_closures() -> None:
    def times(factor: float) -> Callable[[Any], Any]:
        return lambda x: x * factor

    pins = {pin(net(act=act)) for act in (times(2), times(3), functools.partial(pow, 2), functools.partial(pow, 3))}
    pins |= {pin(net(act=act)) for act in (torch.relu, functional.gelu, functional.relu, torch.tanh, math_like)}
    assert len(pins) == 9
    assert pin(net(act=times(2))) == pin(net(act=times(2)))


def test_defaults_of_functions() -> None:
    def made(factor: float, power: int) -> Callable[..., Any]:
        def act(x: Any, times: float = factor, *, to: int = power) -> Any:
            return times * x**to

        return act

    assert pin(made(2.0, 2)) == pin(made(2.0, 2))
    assert len({pin(made(*each)) for each in ((2.0, 2), (3.0, 2), (2.0, 3))}) == 3


def math_like(x: Any, *, power: int = 2) -> Any:
    return x**power


def test_modules_of_the_user_that_a_function_names() -> None:
    def calling(code: str) -> Any:
        return module("def act(x):\n    return other.act(x)", other=module(code)).act

    codes = ["def act(x):\n    return x", "def act(x):\n    return -x", "A = 1\ndef act(x):\n    return x"]
    pins = [pin(calling(code)) for code in codes]
    assert pins[0] != pins[1] and pins[0] == pins[2]  # what it does not use is left out


def test_modules_inside_of_modules_and_cached_functions() -> None:
    def calling(code: str) -> Any:
        package = module("", inner=module(code))
        package.inner.back = package
        return module("def act(x):\n    return package.inner.act(x)", package=package).act

    pins = [pin(calling(f"def act(x):\n    return x * {factor}")) for factor in (2, 3, 2)]
    assert pins[0] != pins[1] and pins[0] == pins[2]
    cached = "import functools\n@functools.lru_cache\ndef act(x):\n    return x * {}"
    pins = [pin(module(cached.format(factor)).act) for factor in (2, 3, 2)]
    assert pins[0] != pins[1] and pins[0] == pins[2]


def test_long_chains_of_functions() -> None:
    def chain(length: int) -> Any:
        lines = [f"def f{place}(x):\n    return f{place + 1}(x)" for place in range(length)]
        return module("\n".join([*lines, f"def f{length}(x):\n    return x"])).f0

    assert pin(chain(100)) != pin(chain(101))
    with pytest.raises(ValueError, match="too long"):
        pin(chain(5000))


def test_patched_methods() -> None:
    plain = pin(nn.Sequential(nn.Linear(2, 2)))
    patched = nn.Sequential(nn.Linear(2, 2))
    patched[0].forward = lambda x: x
    assert pin(patched) != plain
    forward = nn.ReLU.forward
    before = pin(nn.ReLU())
    nn.ReLU.forward = lambda self, x: x
    try:
        assert pin(nn.ReLU()) != before
    finally:
        nn.ReLU.forward = forward
    assert pin(nn.ReLU()) == before


def test_modules_of_torch_and_their_attributes() -> None:
    made = [
        *(nn.Sequential(each) for each in (nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.LeakyReLU(), nn.LeakyReLU(0.2))),
        *(nn.Sequential(each) for each in (nn.LayerNorm(3), nn.LayerNorm(3, eps=1e-3))),
        nn.Sequential(nn.ReLU(), nn.GELU()), nn.Sequential(nn.GELU(), nn.ReLU()), nn.ModuleList([nn.ReLU()]),
    ]  # fmt: skip
    assert len({Pins(each).hash(each) for each in made}) == len(made)


def test_what_decides_no_forward_in_eval_mode_is_left_out() -> None:
    made = network("vit").model
    before = Pins(made).hash(made)
    made.train()
    made.name_or_path = "elsewhere"
    try:
        assert Pins(made).hash(made) == before
    finally:
        made.eval()
        made.name_or_path = ""


def test_the_attention_of_transformers_decides_the_last_bits() -> None:
    made = copy.deepcopy(network("vit").model)
    before = pin(made)
    made.set_attn_implementation("eager")
    assert pin(made) != before


def test_attention_that_configs_do_not_name_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = copy.deepcopy(network("vit").model)
    monkeypatch.delattr(transformers.PreTrainedConfig, "_attn_implementation")  # as if a version called it differently
    with pytest.raises(AttributeError, match="_attn_implementation"):
        pin(made)
    assert pin(transformers.BitsAndBytesConfig()) != pin(transformers.BitsAndBytesConfig(load_in_8bit=True))


def test_attention_that_a_user_has_registered() -> None:
    made, pins = copy.deepcopy(network("vit").model), []
    for factor in (2, 3, 2):
        act = module(f"def attend(module, q, k, v, mask, **options):\n    return v * {factor}, None").attend
        transformers.AttentionInterface.register("of_a_user", act)
        made.set_attn_implementation("of_a_user")
        pins.append(pin(made))
    assert pins[0] != pins[1] and pins[0] == pins[2]


def test_weights_are_left_out_only_where_a_state_dict_has_them() -> None:
    def hidden(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(2, 2))
        made.parts = [nn.Linear(2, 2)]  # in no state dict
        return made

    one, two = hidden(0), hidden(1)
    two[0].load_state_dict(one[0].state_dict())
    assert Pins(one).hash(one) != Pins(two).hash(two)
    two.parts[0].load_state_dict(one.parts[0].state_dict())
    assert Pins(one).hash(one) == Pins(two).hash(two)
    with torch.no_grad():
        two[0].weight.add_(1)
    assert Pins(one).hash(one) == Pins(two).hash(two) and pin(one) != pin(two)


def test_buffers_that_a_state_dict_leaves_out() -> None:
    made = nn.Sequential(nn.ReLU())
    made.register_buffer("scale", torch.ones(2), persistent=False)
    before = Pins(made).hash(made)
    made.scale[0] = 2
    assert Pins(made).hash(made) != before


def test_hooks() -> None:
    made = nn.Sequential(nn.Linear(2, 2))
    pins = [pin(made)]
    first = made[0].register_forward_hook(lambda module, inputs, output: output * 0)
    pins.append(pin(made))
    first.remove()
    second = made[0].register_forward_hook(lambda module, inputs, output: output * 2)
    pins.append(pin(made))
    second.remove()
    made[0].register_forward_pre_hook(lambda module, inputs: inputs)
    pins.append(pin(made))
    assert len(set(pins)) == 4


def test_parametrizations() -> None:
    class Twice(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    def made() -> list[nn.Module]:
        torch.manual_seed(0)
        three = [nn.Linear(2, 2) for _ in range(3)]
        parametrize.register_parametrization(three[1], "weight", Twice())
        parametrizations.weight_norm(three[2])
        return [*three]

    pins = [Pins(each).hash(each) for each in made()]
    assert len(set(pins)) == 3 and pins == [Pins(each).hash(each) for each in made()]


def test_objects_in_attributes() -> None:
    class Options:
        def __init__(self, value: Any) -> None:
            self.value, self.itself = value, self

    values = [
        1, True, 1.0, "1", None, (1,), [1], {1}, {1: 2}, {2: 1}, torch.ones(1), torch.ones(1).half(), torch.zeros(1),
        b"1", re.compile("1"), re.compile("2"), Path("1"), torch.float16, slice(1), slice(2), threading.Lock(),
        iter([1]), {1: 2, 3: 4}, {3: 4, 1: 2}, range(3), Options(1), torch.ones(1).numpy(), torch.Size([1]),
    ]  # fmt: skip
    pins = [pin(Options(value)) for value in values]
    assert len(set(pins)) == len(values)
    assert pins == [pin(Options(value)) for value in values]


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_refused() -> None:
    with pytest.raises(ValueError, match="TorchScript"):
        pin(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))


SOME = ("cnn", "swin", "vit", "llama", "t5")
PRINTED = f"""
from tiny_networks import network
from hf_stitch.adapters.pins import Pins
for family in {SOME}:
    adapter = network(family)
    adapter.candidates
    print(Pins(adapter.model).hash(adapter.model))
"""


def test_other_processes_find_the_same_before_and_after_a_forward() -> None:
    place, new = Path(__file__).parents[1], [network(family).model for family in SOME]
    used = subprocess.run(
        [sys.executable, "-c", PRINTED],
        capture_output=True, text=True, check=True, cwd=place, env={**os.environ, "PYTHONHASHSEED": "2"},
    ).stdout.split()  # fmt: skip
    assert used == [Pins(model).hash(model) for model in new] and len(set(used)) == len(SOME)
