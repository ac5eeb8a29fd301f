"""Image encoders: published networks, and untrained networks of the same architectures."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache as remembered
from pathlib import Path

import study
import torch
from dr_frankenstein import images, networks
from relative_representations.encoders import digest
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch import Adapter, Samples

FINAL = "final"
"""The pooled features before the classifier."""
PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "tiny10": {"bn5": "bn5", "bn6": "bn6", FINAL: "bn8"},
    "resnet20": {"bn5": "layer2.2", "bn6": "layer3.0", FINAL: "layer3.2"},
}
"""Architecture -> cut -> layer. Both architectures have 32 features at ``bn5``, and 64 at the other cuts."""


@dataclass(frozen=True)
class Published:
    """Published network that encodes samples at all cuts of its architecture in one pass.

    Its vectors are means over the positions of a layer; at the last cut, after the ReLU, they are the features of the
    classifier.
    """

    name: str
    adapter: Adapter
    cuts: Mapping[str, str]  # cut -> layer of the architecture
    cut: str = FINAL  # cut of the vectors

    @torch.no_grad()
    def vectors(self, samples: Samples, cache: Path) -> Tensor:
        """Encode samples as ``(n, width)`` float32, or read them from the cache."""
        weights = self.adapter.pinned.weights_hash
        path = cache / "vectors" / f"{digest(weights, dict(self.cuts), samples.fingerprint)}.safetensors"
        if not path.is_file():
            parts = [
                self._cuts_of(networks.normalised(some).contiguous(memory_format=torch.channels_last))
                for some in _squares(samples).split(250)
            ]
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({cut: torch.cat([part[cut] for part in parts]) for cut in self.cuts}, path)
        return load_file(path)[self.cut]

    def _cuts_of(self, inputs: Tensor) -> dict[str, Tensor]:
        network, means = self.adapter.model, {}

        def keep(cut: str, values: Tensor) -> None:
            means[cut] = (functional.relu(values) if cut == FINAL else values).mean((2, 3))

        with study.watched({cut: network.get_submodule(layer) for cut, layer in self.cuts.items()}, keep):
            network(inputs)
        return means


@remembered
def _squares(samples: Samples) -> Tensor:
    return images.squares(samples)


def published(folder: Path, architecture: str, count: int) -> list[Published]:
    """Load networks of Csiszárik et al. 2021, trained on CIFAR-10, by the numbers in the names of their files."""
    files = sorted((folder / f"drfrankenstein_{architecture}").glob("in*.safetensors"), key=_number)[:count]
    if len(files) < min(count, 2):
        raise FileNotFoundError(
            f"{folder}/drfrankenstein_{architecture} must contain at least {min(count, 2)} networks, got {len(files)}"
        )
    return [
        Published(f"{architecture} {_number(file)}", networks.adapted(networks.read(file)[0]), PUBLISHED[architecture])
        for file in files
    ]


def _number(file: Path) -> int:
    return int(file.stem.split("-")[0].removeprefix("in"))


@torch.no_grad()
def untrained(count: int, data_dir: str | None) -> list[Published]:
    """Create untrained Tiny-10 networks, with the statistics of images in BatchNorm."""
    encoders, (pixels, _) = [], images.read("cifar10", "train", 2_000, data_dir)
    for seed in range(count):
        torch.manual_seed(seed)
        network = networks.Tiny10()
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None  # the mean over all batches
        network.train()
        for some in pixels.split(250):
            network(networks.normalised(some))
        encoders.append(Published(f"untrained tiny10 {seed}", networks.adapted(network), PUBLISHED["tiny10"]))
    return encoders


def at(encoder: Published, cut: str) -> Published:
    return replace(encoder, cut=cut)
