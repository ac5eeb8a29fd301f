"""Is S_Atom 1, and do similarities of activations fall to 0, for the toy regression of Chen, Miao & Qiu (figure 10b)?

python -m filter_atoms.toy_regression --out OUT
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from filter_atoms.experiment import Claim, filled, leave
from hf_stitch_filter_atoms import FilterAtoms, atomize, train_atoms_only
from study import parser, table
from torch import Tensor, nn

from hf_stitch.metrics import linear_cka

NAME = "toy_regression"
HIGH, LOW = 0.95, 0.1  # a similarity that is 1 in the paper must be at least HIGH here, one that is 0 at most LOW
STARTS = {
    "same": "the same initial atoms (as in the paper)",
    "no x": "the same initial atoms, their part for x set to 0",
    "other x": "other initial atoms for x, the same for y",
    "other": "other initial atoms",
}


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment."""

    samples: int  # number of samples for training, and of probing samples
    steps: int  # steps of Adam on all samples
    pairs: int  # number of pairs of networks


PRESETS = {"small": Preset(500, 1000, 6), "paper": Preset(5000, 5000, 30), "test": Preset(50, 20, 2)}


def main() -> None:
    """Run the experiment from the command line."""
    arguments = parser(__doc__, presets=PRESETS).parse_args()
    preset = PRESETS[arguments.preset]
    kinds = {name: [compared(preset, name, seed) for seed in range(preset.pairs)] for name in STARTS}
    leave(NAME, {"preset": arguments.preset, "sizes": preset, "kinds": kinds}, page, {}, arguments.out)


def drawn(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw "red" inputs (0, y) as images ``(samples, 1, 1, 2)``, and their values sin(6 y) + ε."""
    random = torch.Generator().manual_seed(seed)
    y, error = 0.5 + 0.1 * torch.randn(2, samples, 1, generator=random)
    return torch.stack((torch.zeros_like(y), y), dim=-1)[:, None], torch.sin(6 * y) + error


def network(seed: int) -> nn.Sequential:
    """Create a network of one atomic layer, whose two atoms are vectors (x, y), and one linear layer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Conv2d(1, 32, (1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1))
    atomize(made)
    return made


def trained(made: nn.Sequential, preset: Preset, seed: int) -> nn.Sequential:
    """Train the atoms and the linear layer on red data."""
    inputs, values = drawn(preset.samples, seed)
    optimizer = torch.optim.Adam(train_atoms_only(made, also=("3",)), 1e-2)
    for _ in range(preset.steps):
        loss = (made(inputs) - values).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made.eval()


def compared(preset: Preset, start: str, seed: int) -> dict[str, Any]:
    """Train two networks on different samples of the red data, and compare them on red and blue data."""
    one = network(seed)
    other = copy.deepcopy(one)
    with torch.no_grad():
        fresh = torch.randn(2, generator=torch.Generator().manual_seed(seed))
        first, second = (made.get_parameter("0.atoms") for made in (one, other))  # (2, 1, 2)
        if start == "no x":
            first[..., 0] = second[..., 0] = 0
        if start in ("other x", "other"):
            second[:, 0, 0] = fresh
        if start == "other":
            second[:, 0, 1] = fresh.flip(0)
    for place, made in enumerate((one, other)):
        trained(made, preset, 2 * seed + place)
    red, _ = drawn(preset.samples, 10_000 + seed)
    blue = red.flip(3)
    metric = FilterAtoms()
    read = [metric.read(made)["0"] for made in (one, other)]
    return {
        "atom": metric.value(*read),
        **{f"{part} {name}": _cka(one, other, data, depth) for name, data in (("red", red), ("blue", blue))
           for part, depth in (("hidden", 2), ("output", 4))},
    }  # fmt: skip


@torch.no_grad()
def _cka(one: nn.Sequential, other: nn.Sequential, data: Tensor, depth: int) -> float | None:
    """Return the linear CKA after some layers; ``None`` if a side is constant."""
    x, y = (made[:depth](data).flatten(1).double() for made in (one, other))
    if min(x.std(0).max(), y.std(0).max()) < 1e-6:
        return None
    return float(linear_cka(x, y))


FALLS = Claim(
    "appendix A.3, figure 10b", "Similarity of activations falls to 0 on other data, S_Atom stays 1.",
    "S_Atom 1, red 1, blue 0",
    f"with the same start, S_Atom and the CKA of hidden units on red data are at least {HIGH:g}, and that on blue data "
    f"at most {LOW:g}; in part: the first two; refuted if one of these is not", stand_in=False,
)  # fmt: skip


def _values(pairs: list[Mapping[str, float | None]], key: str) -> list[float]:
    return [value for pair in pairs if (value := pair[key]) is not None]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    same = record["kinds"]["same"]
    atom, red, blue = (float(np.mean(_values(same, key))) for key in ("atom", "hidden red", "hidden blue"))
    high = atom >= HIGH and red >= HIGH
    ours = f"S_Atom {atom:.2f}; CKA red {red:.2f}; CKA blue {blue:.2f}"
    return [FALLS.row(ours, f"{len(same)} pairs", [high, high and blue <= LOW], len(same))]


PAGE = """# Toy regression

**What to do**: do not conclude from this example that probes mislead: on other data, CKA does not fall to 0 here; it is
undefined where activations are constant.

{verdicts}

{title}, appendix A.3, figure 10b: two networks learn z = f(x, y) from "red" data, where x is always 0. Their atoms
are the same at the start, so are their coefficients. The paper: S_Atom is 1, and the similarity of activations is 1 on
red data and 0 on "blue" data, where x takes the values of y and y is 0.

Here: z = sin(6 y) + ε, y and ε from N(.5, .1) as in the paper (its f is not given); 32 units with two atoms, ReLU, a
linear layer; {steps} steps of Adam on {samples} samples, other samples for each network; {pairs} pairs for each start.
Similarity of activations: linear CKA of the hidden units and of the output, on {samples} new samples; mean of the pairs
where it is defined.

{table}

Red data does not move the part of the atoms for x. With the same start, that part stays the same in both networks, and
so does what it makes of blue data. Where it is 0, activations are constant on blue data, and no similarity is defined.
Other starts do not bring CKA of the hidden units to 0 either: they are functions of one number. What falls there is the
similarity of the outputs, and S_Atom, although these networks compute the same function of red data.

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    keys = {"atom": "S_Atom"} | {f"{part} {data}": f"CKA, {part}, {data}"
                                 for part in ("hidden", "output") for data in ("red", "blue")}  # fmt: skip
    columns = {title: lambda _, pairs, key=key: _shown(pairs, key) for key, title in keys.items()}
    shown = table(record["kinds"].items(), {"start": lambda name, _: STARTS[name]} | columns)
    return filled(PAGE, NAME, claims(record), "--out OUT", **record["sizes"], table=shown)


def _shown(pairs: list[Mapping[str, float | None]], key: str) -> str:
    values = _values(pairs, key)
    if not values:
        return "undefined: constant"
    text = f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
    missing = len(pairs) - len(values)
    return text + (f", undefined in {missing} pairs" if missing else "")


if __name__ == "__main__":
    main()
