"""Train base networks as in Csiszárik et al. 2021 (appendix A.1) and save them in a folder.

Existing networks of the folder are not trained again.

    python run.py dr_frankenstein.base_training --data-dir DATA --networks NETWORKS --seeds 0 1
"""

import argparse
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from dr_frankenstein import images, networks
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, get_cosine_schedule_with_warmup, set_seed

from hf_stitch import Adapter
from hf_stitch.storage.files import write_whole


@dataclass(frozen=True)
class Base:
    """Architecture and training of a base network.

    SGD has Nesterov momentum .9, learning rate .1 and weight decay 1e-4. The ViT uses AdamW: 1e-3 after a warm-up, then
    cosine decay, weight decay .05.
    """

    architecture: str  # tiny10, resnet20 or vit
    epochs: int
    images: int
    seed: int  # of initial weights, order and augmentation
    width: float = 1  # of ResNet-20
    optimizer: str = "sgd"

    @property
    def name(self) -> str:
        variant = f"-w{self.width:g}" if self.architecture == "resnet20" else ""
        return f"{self.architecture}{variant}-cifar10-{self.optimizer}-{self.images}x{self.epochs}-seed{self.seed}"

    def build(self) -> nn.Module:
        set_seed(self.seed)
        if self.architecture == "vit":
            return networks.small_vit()
        return networks.ResNet20(self.width) if self.architecture == "resnet20" else networks.Tiny10()


def trained(base: Base, folder: Path, data_dir: str | None) -> nn.Module:
    """Load a trained network in eval mode from the folder; train and save it first if it is missing."""
    network = base.build()
    path = folder / f"{base.name}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.is_file():
            train(base, network, *images.read("cifar10", "train", base.images, data_dir))
            right = accuracy(network, *images.read("cifar10", "test", 10_000, data_dir))
            state, metadata = network.state_dict(), {"accuracy": f"{right:.4f}"}
            write_whole(path, lambda whole: save_file(state, whole, metadata))
    network.load_state_dict(load_file(path))
    return network.eval()


def adapted(bases: Iterable[Base], folder: Path, data_dir: str | None) -> dict[str, Adapter]:
    """Load trained networks as adapters: seed -> adapter."""
    return {str(base.seed): networks.adapted(trained(base, folder, data_dir)) for base in bases}


def recorded_accuracy(base: Base, folder: Path) -> float:
    """Return the accuracy of a saved network on the 10,000 test images."""
    with safe_open(folder / f"{base.name}.safetensors", "pt") as file:
        return float(file.metadata()["accuracy"])


def train(base: Base, network: nn.Module, pixels: Tensor, labels: Tensor) -> None:
    """Train with ``transformers.Trainer``."""
    model = _Classifier(network.to(memory_format=torch.channels_last))
    data = _Augmented(pixels, labels, torch.Generator().manual_seed(base.seed))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=base.epochs, per_device_train_batch_size=128, max_grad_norm=0, seed=base.seed,
            bf16=base.architecture != "vit",  # attention in bfloat16 is slow on many CPUs
            use_cpu=not torch.cuda.is_available(), save_strategy="no", logging_strategy="epoch", report_to=[],
            remove_unused_columns=False,
        )  # fmt: skip
        optimizers = _optimizers(base, model, base.epochs * -(-len(pixels) // 128))
        Trainer(model, arguments, train_dataset=data, data_collator=dict, optimizers=optimizers).train()
    network.to("cpu", memory_format=torch.contiguous_format)


def _optimizers(base: Base, model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer: torch.optim.Optimizer
    if base.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
        return optimizer, get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4, nesterov=True)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps // 3, 2 * steps // 3])


@torch.no_grad()
def accuracy(network: nn.Module, pixels: Tensor, labels: Tensor) -> float:
    network.eval()
    right = sum(
        int((network(networks.normalised(some)).argmax(1) == classes).sum())
        for some, classes in zip(pixels.split(500), labels.split(500), strict=True)
    )
    return right / len(pixels)


class _Augmented(Dataset):
    """Dataset that returns augmented images and their labels, one batch at a time."""

    def __init__(self, pixels: Tensor, labels: Tensor, generator: torch.Generator) -> None:
        self._pixels, self._labels, self._generator = pixels, labels, generator

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, places: list[int]) -> dict[str, Tensor]:
        pixels = images.augmented(self._pixels[places], self._generator)
        return {"pixels": networks.normalised(pixels), "labels": self._labels[places]}


class _Classifier(nn.Module):
    """Network with its loss, in the format of the Trainer."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(pixels.contiguous(memory_format=torch.channels_last)).float()
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=Path, required=True, help="folder of trained networks")
    parser.add_argument("--data-dir", help="local folder of the datasets; default: the Hub")
    parser.add_argument("--architecture", choices=("tiny10", "resnet20", "vit"), default="resnet20")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        base = Base(arguments.architecture, arguments.epochs, arguments.images, seed, optimizer=arguments.optimizer)
        trained(base, arguments.networks, arguments.data_dir)
