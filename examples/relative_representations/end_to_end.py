"""Networks trained on relative representations from the start, beside absolute ones (Moschella et al. 2023, section 4).

Images (Fashion-MNIST, CIFAR-10) by a convolutional network, nodes of citation graphs (Cora, CiteSeer) by a graph
convolutional one. Anchors are embedded anew every step, without a gradient. Afterwards encoders and heads of different
seeds are put together.

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
    """How much of everything.

    Attributes:
        train: Training images.
        test: Images to score on.
        anchors: Number of anchors.
        width: Multiple of 32, 64, 128 and 256 channels.
        epochs: Over the training images.
        steps: Over a graph.
        seeds: Networks of each kind.
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
"""F1 in percent."""


@dataclass(frozen=True)
class Task:
    """What is learnt.

    Attributes:
        build: From a seed to a network that maps places of samples to vectors, and the width of those.
        labels: ``(n,)``, of all samples.
        train: Places of the training samples.
        test: Places of those to score on.
        different: Places of training samples of which no two are alike for every network: candidates for anchors.
        batch: Training samples in a batch.
        epochs: Over them.
        learning_rate: Of AdamW.
        batch_norm: Whether the network has BatchNorm, which is to see anchors in training as it sees samples.
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
    """A network in its parts; without a projection the head sees vectors as they are."""

    encoder: nn.Module
    projection: RelativeProjection | None
    head: Head

    @torch.no_grad()
    def answers(self, other: "Trained", places: Tensor) -> Tensor:
        """Classes of samples by the encoder of another network and the head of this one."""
        codes = torch.cat([other.encoder(some) for some in places.split(500)])
        if self.projection is not None and other.projection is not None:
            codes = self.projection.with_anchors(other.projection.anchors)(codes)
        return heads.answers(self.head, codes)


def fit(task: Task, anchors: Tensor | None, seed: int, every: int = 1) -> Trained:
    """Train encoder and head together.

    Args:
        task: What is learnt.
        anchors: Places of the anchors; ``None``: an absolute network.
        seed: Of weights and order.
        every: Steps from one embedding of the anchors to the next.
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
        seen = codes if projection is None else projection(codes)
        return head(features=seen, labels=task.labels[places]).loss

    train(
        whole, len(task.train), loss, epochs=task.epochs, batch=task.batch,
        learning_rate=task.learning_rate, weight_decay=5e-4, seed=seed, name="training",
    )  # fmt: skip
    if anchors is not None:
        AnchorRefresh(whole, anchors, **options).refresh()
    return Trained(encoder, projection, head)


class Convolutional(nn.Module):
    """Four convolutions of stride 2 with BatchNorm and GELU, and a linear layer, over images that it holds."""

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
        """Places (n,) of images to (n, width)."""
        return self.layers(self._images[places])


class GraphConvolutional(nn.Module):
    """Two graph convolutions (Kipf and Welling 2017) over a graph that it holds."""

    def __init__(self, features: Tensor, neighbours: Tensor, width: int) -> None:
        super().__init__()
        self._features, self._neighbours = features, neighbours
        self.first, self.second = nn.Linear(features.shape[1], width), nn.Linear(width, width)

    def forward(self, places: Tensor) -> Tensor:
        """Places (n,) of nodes to (n, width)."""
        x = torch.sparse.mm(self._features, self.first.weight.T) + self.first.bias
        # With ReLU, all units are off at some nodes, which then cannot be told apart as anchors.
        x = functional.dropout(torch.sparse.mm(self._neighbours, x).tanh(), 0.5, self.training)
        return torch.sparse.mm(self._neighbours, self.second(x))[places]


def of_images(name: str, preset: Preset, data_dir: str | None) -> Task:
    """Training and test images in one row, and how they are learnt."""
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
    """A citation graph of Planetoid, a tenth of its labelled nodes held out at random, as in the authors' code.

    Raises:
        SystemExit: If no folder of data is given: it is on no Hub.
    """
    if data_dir is None:
        raise SystemExit(f"{name} is not on the Hub: give --data-dir, a folder that holds planetoid/{name}.npz")
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
    # Two convolutions see no more of a node than this; isolated nodes and twins have the same.
    mixed = torch.sparse.mm(features, torch.randn(width, 8, generator=torch.Generator().manual_seed(0)))
    around = torch.sparse.mm(neighbours, torch.sparse.mm(neighbours, mixed))
    _, kinds = around.mul(1e4).round().unique(dim=0, return_inverse=True)
    different = kept[torch.from_numpy(np.unique(kinds[kept].numpy(), return_index=True)[1])]
    return Task(build, torch.from_numpy(held["y"]).long(), kept, test, different, len(kept), preset.steps, 1e-2, False)


def anchors_of(task: Task, count: int) -> Tensor:
    """Places of random training samples."""
    return task.different[torch.randperm(len(task.different), generator=torch.Generator().manual_seed(0))[:count]]


def main() -> None:
    """Parse the arguments, train, exchange, show."""
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
