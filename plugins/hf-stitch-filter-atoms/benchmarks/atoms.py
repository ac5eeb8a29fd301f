"""Cost of S_Atom, the similarity of filter atoms, compared with CKA, CCA and the cosine of weights.

The benchmark uses two settings of Chen, Miao & Qiu (NeurIPS 2023): federated learning (120 clients, AlexNet with 3
convolutions, 10,000 probing images; figure 3a, table 1), and continual learning (10 tasks, AlexNet with 5 convolutions,
1,000 images; table 2). Weights, images and activations are random, in float32. CKA and CCA compare means over
positions, their cheapest variant. Times are processor seconds, which on one thread equal wall-clock seconds on an idle
machine. Totals for all pairs are computed from parts: networks times forward pass or reading, plus pairs times
comparison.

Install the metrics with ``pip install hf-stitch-filter-atoms hf-stitch-versions``.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb

import torch
from hf_stitch_filter_atoms import FilterAtoms, atomize
from hf_stitch_versions import WeightCosine
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.timing import in_turn, show
from hf_stitch.metrics import WeightMetric, cca, linear_cka
from hf_stitch.statistics import Weights

SIDE, BATCH, REPEATS, LOOPS = 32, 250, 5, 100
IMAGES = 1_000
"""Number of timed images; the seconds of a forward pass are proportional."""
ATOMS = KERNEL = 9
"""Number of atoms, and entries of a kernel."""
FORWARD, READ_ATOMS, READ_WEIGHTS = "forward", "read atoms", "read weights"
CKA, CCA, ATOM, AT_ONCE, COSINE = "CKA", "CCA", "S_Atom", "S_Atom, all pairs at once", "weight cosine"
NEEDS = {CKA: FORWARD, CCA: FORWARD, ATOM: READ_ATOMS, AT_ONCE: READ_ATOMS, COSINE: READ_WEIGHTS}
"""Comparison -> operation required once per network."""


@dataclass(frozen=True)
class Setting:
    """A setting of the paper.

    Attributes:
        channels: Outputs of each 3×3 convolution.
        pooled: Numbers of the convolutions before a max pooling, from 1.
        models: Number of networks; all pairs are compared.
        probe: Number of images.
        published: The paper's ratios of operations and times of CKA and CCA to S_Atom.
    """

    channels: tuple[int, ...]
    pooled: tuple[int, ...]
    models: int
    probe: int
    published: Mapping[str, str]

    @property
    def pairs(self) -> int:
        """Number of pairs of networks."""
        return comb(self.models, 2)

    def network(self) -> nn.Sequential:
        """Build the network with random weights, without its head."""
        layers: list[nn.Module] = []
        before = 3
        for number, channels in enumerate(self.channels, 1):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if number in self.pooled else []
            before = channels
        return nn.Sequential(*layers).eval()

    def shapes(self) -> list[tuple[int, int, int]]:
        """Return input channels, output channels and positions of each convolution."""
        shapes, side, before = [], SIDE, 3
        for number, channels in enumerate(self.channels, 1):
            shapes.append((before, channels, side * side))
            before, side = channels, side // 2 if number in self.pooled else side
        return shapes

    def operations(self) -> dict[str, float]:
        """Count multiply-adds for all pairs.

        S_Atom and the cosine require an inner product per layer and pair, and a norm per layer and network. CKA
        requires the forward passes, covariance products (from means over positions) or Gram matrices of all positions
        once per network, and their inner products. CCA as counted in the paper (section 2.3) requires the forward
        passes, and n² products of flattened activations for each pair.
        """
        n, k, pairs, shapes = self.probe, self.models, self.pairs, self.shapes()
        forward = k * n * sum(KERNEL * a * b * positions for a, b, positions in shapes)
        means = (k + pairs) * n * sum(b * b for _, b, _ in shapes)
        grams = k * n * n * sum(b * positions for _, b, positions in shapes) + pairs * n * n * len(shapes)
        flattened = pairs * n * n * sum(b * positions for _, b, positions in shapes)
        return {
            ATOM: (k + pairs) * ATOMS * KERNEL * len(shapes),
            COSINE: (k + pairs) * KERNEL * sum(a * b for a, b, _ in shapes),
            f"{CKA}, comparisons alone (means)": means,
            f"{CKA}, means": forward + means,
            f"{CKA}, Gram matrices": forward + grams,
            f"{CCA} by the paper's formula": forward + flattened,
        }


SETTINGS = {
    "federated": Setting(
        (64, 128, 256), (1, 2, 3), 120, 10_000,
        {f"{CKA} operations": "1.2e5", f"{CCA} operations": "1.4e7", f"{CKA} time": "5.8e3", f"{CCA} time": "1.2e5"},
    ),
    "continual": Setting(
        (64, 192, 384, 256, 256), (1, 2, 5), 10, 1_000,
        {f"{CKA} operations": "1.6e4", f"{CCA} operations": "5.0e3", f"{CKA} time": "375", f"{CCA} time": "325"},
    ),
}  # fmt: skip


def forward(network: nn.Sequential, images: Tensor) -> list[Tensor]:
    """Return the means over positions of the outputs of all convolutions, each ``(n, channels)``."""
    layer_means: list[list[Tensor]] = []
    for x in images.split(BATCH):
        means = []
        for module in network:
            x = module(x)
            if isinstance(module, nn.Conv2d):
                means.append(x.mean((2, 3)))
        layer_means.append(means)
    return [torch.cat(parts) for parts in zip(*layer_means, strict=True)]


def similarity(metric: Callable[[Tensor, Tensor], Tensor], first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the mean similarity over layers of two networks from their activations."""
    return statistics.mean(float(metric(x, y)) for x, y in zip(first, second, strict=True))


def similarity_of_weights(metric: WeightMetric, first: Mapping[str, Weights], second: Mapping[str, Weights]) -> float:
    """Return the similarity of two networks from readings of a weight metric."""
    return metric.combine({layer: metric.value(first[layer], second[layer]) for layer in first})


def at_once(atoms: Tensor) -> Tensor:
    """Return the S_Atom of all pairs of networks ``(models, models)`` from atoms ``(layers, models, m · kh · kw)``."""
    units = functional.normalize(atoms, dim=2)
    return (units @ units.mT).mean(0)


def many(function: Callable[[], object]) -> Callable[[], None]:
    """Return a function that repeats a fast call many times."""

    def run() -> None:
        for _ in range(LOOPS):
            function()

    return run


@torch.no_grad()
def parts(setting: Setting) -> tuple[dict[str, float], dict[str, int]]:
    """Time all parts in turn.

    Returns:
        Part -> median seconds; and operation per network -> bytes stored.
    """
    torch.manual_seed(0)
    a = setting.network()
    atomize(a)
    b = copy.deepcopy(a)
    for name, parameter in b.named_parameters():
        if name.endswith("atoms"):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    images = torch.randn(IMAGES, 3, SIDE, SIDE)
    x, y = ([torch.randn(setting.probe, channels) for channels in setting.channels] for _ in range(2))
    atoms, weights = FilterAtoms(), WeightCosine()
    readings, whole = [atoms.read(net) for net in (a, b)], [weights.read(net) for net in (a, b)]
    every = torch.randn(len(setting.channels), setting.models, ATOMS * KERNEL, dtype=torch.float64)
    quick: dict[str, Callable[[], object]] = {
        ATOM: partial(similarity_of_weights, atoms, *readings),
        AT_ONCE: partial(at_once, every),
        COSINE: partial(similarity_of_weights, weights, *whole),
        READ_ATOMS: partial(atoms.read, a),
        READ_WEIGHTS: partial(weights.read, a),
    }
    slow: dict[str, Callable[[], object]] = {
        FORWARD: partial(forward, a, images),
        CKA: partial(similarity, linear_cka, x, y),
        CCA: partial(similarity, cca, x, y),
    }
    ways = {**{name: many(function) for name, function in quick.items()}, **slow}
    in_turn(ways, 1)
    timings = in_turn(ways, REPEATS, time.process_time)
    seconds = {name: statistics.median(runs) / (LOOPS if name in quick else 1) for name, runs in timings.items()}
    seconds[AT_ONCE] /= setting.pairs
    seconds[FORWARD] *= setting.probe / IMAGES
    return seconds, {
        FORWARD: sum(rows.nbytes for rows in x),
        READ_ATOMS: sum(tensor.nbytes for layer in readings[0].values() for tensor in layer.tensors.values()),
        READ_WEIGHTS: sum(tensor.nbytes for layer in whole[0].values() for tensor in layer.tensors.values()),
    }


def main() -> None:
    """Run the benchmark and print its tables."""
    torch.set_num_threads(1)
    columns = ["comparison", "kept, kB", "each network s", "each pair s", "from scratch", "atoms at hand"]
    columns += ["both at hand", "all pairs s", "all pairs, ratio"]
    for name, setting in SETTINGS.items():
        title, counts = f"{name}: {setting.models} networks, {setting.probe:,} images", setting.operations()
        show(title, columns, times(setting, *parts(setting)))
        rows = ((way, f"{count:.2e}", f"{count / counts[ATOM]:.1e}") for way, count in counts.items())
        show(title, ("multiply-adds for all pairs", "count", "over S_Atom"), rows)
        print("Published, over S_Atom:", ", ".join(f"{way} {ratio}" for way, ratio in setting.published.items()))


def times(setting: Setting, seconds: Mapping[str, float], stored_bytes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of times.

    Ratios are relative to S_Atom: for one pair starting from networks, where each network runs or is read; for one pair
    with available atoms, as after federated training, but without activations; for one pair with both available; and
    for all pairs starting from networks.
    """

    def totals(way: str) -> tuple[float, float, float]:
        before, pair = seconds[NEEDS[way]], seconds[way]
        return 2 * before + pair, pair, setting.models * before + setting.pairs * pair

    base = totals(ATOM)
    for way, need in NEEDS.items():
        whole, pair, every = totals(way)
        ratios = [whole / base[0], whole / base[1] if need == FORWARD else pair / base[1], pair / base[1]]
        cells = [stored_bytes[need] / 1e3, seconds[need], pair, *ratios, every, every / base[2]]
        yield way, *(f"{value:.3g}" for value in cells)
