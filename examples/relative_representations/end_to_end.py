"""End-to-end training with relative and with absolute representations (Moschella et al. 2023, section 4).

A convolutional network classifies images (Fashion-MNIST, CIFAR-10), a graph convolutional network classifies nodes of
citation graphs (Cora, CiteSeer). Anchors are embedded again at every step, without gradients. After training, encoders
and heads of different seeds are combined.

    python examples/relative_representations/end_to_end.py --data-dir DATA --cache CACHE --out OUT
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path

import experiment
import heads
import images
import numpy as np
import pandas as pd
import swapping
import torch
from autoencoders import CHANNELS
from experiment import spread
from swapping import ABSOLUTE, OTHER, OWN, RELATIVE
from torch import Tensor, nn
from torch.nn import functional
from training import train

from hf_stitch.artefacts import Head
from hf_stitch.relative import RelativeProjection
from hf_stitch.training import AnchorRefresh


@dataclass(frozen=True)
class Preset:
    """Sizes and hyperparameters of the experiment.

    Attributes:
        train: Number of training images.
        test: Number of test images.
        anchors: Number of anchors.
        width: Multiplier of 32, 64, 128 and 256 channels.
        epochs: Passes over the training images.
        steps: Training steps on a graph.
        seeds: Number of networks of each kind.
    """

    train: int
    test: int
    anchors: int
    width: float
    epochs: int
    steps: int
    seeds: int


PRESETS = {
    "small": Preset(4_000, 2_000, 300, 0.5, 5, 100, 3),
    "test": Preset(150, 60, 20, 0.25, 1, 3, 2),
    "paper": Preset(60_000, 10_000, 300, 1.0, 30, 500, 10),
}
IMAGES, GRAPHS = ("fashion_mnist", "cifar10"), ("cora", "citeseer")
PAPER = {
    "fashion_mnist": {ABSOLUTE: "90.32 ± 0.21", RELATIVE: "90.19 ± 0.27"},
    "cifar10": {ABSOLUTE: "87.85 ± 0.06", RELATIVE: "87.70 ± 0.09"},
    "cora": {ABSOLUTE: "90 ± 1", RELATIVE: "89 ± 2"},
    "citeseer": {ABSOLUTE: "78 ± 3", RELATIVE: "77 ± 3"},
}
"""Results of the paper, F1 in percent."""


@dataclass(frozen=True)
class Task:
    """A classification task and its training.

    Attributes:
        build: Maps a seed to a network from indices of samples to vectors, and the width of the vectors.
        labels: Classes of all samples ``(n,)``.
        train: Indices of the training samples.
        test: Indices of the test samples.
        different: Indices of training samples that networks can distinguish: candidates for anchors.
        batch: Batch size.
        epochs: Passes over the training samples.
        learning_rate: Learning rate of AdamW.
        batch_norm: Whether the network has BatchNorm, which then embeds anchors in training mode.
    """

    build: Callable[[int], tuple[nn.Module, int]]
    labels: Tensor
    train: Tensor
    test: Tensor
    different: Tensor
    batch: int
    epochs: int
    learning_rate: float
    batch_norm: bool


@dataclass(frozen=True)
class Trained:
    """A trained network in parts. Without a projection, the head receives absolute vectors."""

    encoder: nn.Module
    projection: RelativeProjection | None
    head: Head

    @torch.no_grad()
    def answers(self, other: "Trained", places: Tensor) -> Tensor:
        """Predict classes with the encoder of another network and the head of this one."""
        codes = torch.cat([other.encoder(some) for some in places.split(500)])
        if self.projection is not None and other.projection is not None:
            codes = self.projection.with_anchors(other.projection.anchors)(codes)
        return heads.answers(self.head, codes)


def fit(task: Task, anchors: Tensor | None, seed: int, every: int = 1) -> Trained:
    """Train encoder and head together.

    Args:
        task: Task and training.
        anchors: Indices of the anchors. ``None``: an absolute network.
        seed: Seed of weights and order.
        every: Number of steps between embeddings of the anchors.

    Returns:
        The trained network.
    """
    encoder, width = task.build(seed)
    projection = None if anchors is None else RelativeProjection(width, len(anchors))
    head = heads.new(width if projection is None else projection.out_features, int(task.labels.max()) + 1)
    whole = nn.ModuleList([encoder, head] if projection is None else [encoder, projection, head])
    options = {"encoder": encoder, "every": every, "batch_size": 10_000}
    refresh = None if anchors is None else AnchorRefresh(whole, anchors, training=task.batch_norm, **options)

    def loss(places: Tensor) -> Tensor:
        if refresh is not None:
            refresh.step()
        places = task.train[places]
        codes = encoder(places)
        features = codes if projection is None else projection(codes)
        return head(features=features, labels=task.labels[places]).loss

    train(
        whole, len(task.train), loss, epochs=task.epochs, batch=task.batch,
        learning_rate=task.learning_rate, weight_decay=5e-4, seed=seed, name="training",
    )  # fmt: skip
    if anchors is not None:
        AnchorRefresh(whole, anchors, **options).refresh()
    return Trained(encoder, projection, head)


class Convolutional(nn.Module):
    """Four convolutions with stride 2, BatchNorm and GELU, and a linear layer, on images stored in the module."""

    def __init__(self, pixels: Tensor, width: float) -> None:
        super().__init__()
        self._images = (pixels / 255).contiguous(memory_format=torch.channels_last)
        widths = [pixels.shape[1], *(round(channels * width) for channels in CHANNELS)]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * widths[-1], widths[-1]))
        self.to(memory_format=torch.channels_last)

    def forward(self, places: Tensor) -> Tensor:
        """Map indices of images ``(n,)`` to vectors ``(n, width)``."""
        return self.layers(self._images[places])


class GraphConvolutional(nn.Module):
    """Two graph convolutions (Kipf and Welling 2017) on a graph stored in the module."""

    def __init__(self, features: Tensor, neighbours: Tensor, width: int) -> None:
        super().__init__()
        self._features, self._neighbours = features, neighbours
        self.first, self.second = nn.Linear(features.shape[1], width), nn.Linear(width, width)

    def forward(self, places: Tensor) -> Tensor:
        """Map indices of nodes ``(n,)`` to vectors ``(n, width)``."""
        x = torch.sparse.mm(self._features, self.first.weight.T) + self.first.bias
        # With ReLU, all units are 0 at some nodes, which then cannot be distinguished as anchors.
        x = functional.dropout(torch.sparse.mm(self._neighbours, x).tanh(), 0.5, self.training)
        return torch.sparse.mm(self._neighbours, self.second(x))[places]


def of_images(name: str, preset: Preset, data_dir: str | None) -> Task:
    """Create an image classification task."""
    parts = [images.read(name, split, n, data_dir) for split, n in (("train", preset.train), ("test", preset.test))]
    pixels = torch.cat([images.pixels(part) for part in parts])
    labels = torch.tensor([label for part in parts for label in part.labels or []])
    places, count = torch.arange(len(pixels)), len(parts[0])

    def build(seed: int) -> tuple[nn.Module, int]:
        torch.manual_seed(seed)
        network = Convolutional(pixels, preset.width)
        return network, network.layers[-1].out_features

    return Task(build, labels, places[:count], places[count:], places[:count], 128, preset.epochs, 1e-3, True)


def of_graph(name: str, preset: Preset, data_dir: str | None) -> Task:
    """Create a node classification task on a Planetoid citation graph.

    A random tenth of the labelled nodes is held out, as in the authors' code.

    Raises:
        SystemExit: If ``data_dir`` is ``None``, because the graphs are not on the Hub.
    """
    if data_dir is None:
        raise SystemExit(f"{name} is not on the Hub: pass --data-dir, a folder with planetoid/{name}.npz")
    held = np.load(Path(data_dir, "planetoid", f"{name}.npz"))
    nodes, width = held["x_shape"].tolist()
    values = torch.from_numpy(held["x_data"])
    rows = torch.arange(nodes).repeat_interleave(torch.from_numpy(np.diff(held["x_indptr"])))
    sums = torch.zeros(nodes).index_add(0, rows, values).clamp_min(1)
    indices = torch.stack([rows, torch.from_numpy(held["x_indices"]).long()])
    features = torch.sparse_coo_tensor(indices, values / sums[rows], (nodes, width), check_invariants=True).coalesce()
    loops = torch.arange(nodes).expand(2, -1)
    edges = torch.cat([torch.from_numpy(held["edge_index"]).long(), loops], 1)
    degree = torch.bincount(edges[0], minlength=nodes).float()
    weights = (degree[edges[0]] * degree[edges[1]]).rsqrt()
    neighbours = torch.sparse_coo_tensor(edges, weights, (nodes, nodes), check_invariants=True).coalesce()
    labelled = torch.from_numpy(held["has_label"]).nonzero()[:, 0]
    labelled = labelled[torch.randperm(len(labelled), generator=torch.Generator().manual_seed(0))]
    count = len(labelled) // 10

    def build(seed: int) -> tuple[nn.Module, int]:
        torch.manual_seed(seed)
        return GraphConvolutional(features, neighbours, 64), 64

    test, kept = labelled[:count], labelled[count:]
    # Two graph convolutions depend on nothing else, so that nodes with equal values cannot be distinguished.
    mixed = torch.sparse.mm(features, torch.randn(width, 8, generator=torch.Generator().manual_seed(0)))
    around = torch.sparse.mm(neighbours, torch.sparse.mm(neighbours, mixed))
    _, kinds = around.mul(1e4).round().unique(dim=0, return_inverse=True)
    different = kept[torch.from_numpy(np.unique(kinds[kept].numpy(), return_index=True)[1])]
    return Task(build, torch.from_numpy(held["y"]).long(), kept, test, different, len(kept), preset.steps, 1e-2, False)


def anchors_of(task: Task, count: int) -> Tensor:
    """Select the indices of random training samples."""
    return task.different[torch.randperm(len(task.different), generator=torch.Generator().manual_seed(0))[:count]]


def main() -> None:
    """Run the experiment from the command line."""
    arguments = experiment.parser(__doc__).parse_args()
    preset = PRESETS[arguments.preset]
    rows = []
    for name in (*IMAGES, *GRAPHS):
        task = (of_images if name in IMAGES else of_graph)(name, preset, arguments.data_dir)
        for method, anchors in ((ABSOLUTE, None), (RELATIVE, anchors_of(task, preset.anchors))):
            networks = [fit(task, anchors, seed) for seed in range(preset.seeds)]
            for (source, encoder), (target, head) in product(enumerate(networks), repeat=2):
                scores = swapping.scored(task.labels[task.test], head.answers(encoder, task.test))
                rows.append({"data": name, "method": method, "source": source, "target": target, **scores})
    found = pd.DataFrame(rows)
    lines = []
    for (name, method), part in found.groupby(["data", "method"], sort=False):
        own, other = part[part.source == part.target].f1.tolist(), part[part.source != part.target].f1.tolist()
        lines.append((name, method, spread(own), spread(other), PAPER[name][method]))
    text = experiment.markdown(lines, ("data", "method", OWN, OTHER, f"paper, {OWN}"))
    experiment.leave("end_to_end", text, {"preset": asdict(preset), "f1": found.to_dict("records")}, {}, arguments.out)


if __name__ == "__main__":
    main()
