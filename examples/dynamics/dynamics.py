"""Training dynamics of a small ResNet on CIFAR-10: do lower layers settle first (Raghu et al. 2017)?

Two seeds are trained with transformers' Trainer. The first one is the reference. During training of the second one,
three callbacks record its similarity to its initial state and to the reference, its stitchability into the reference,
and its activations on 500 test images.

    python examples/dynamics/dynamics.py --data-dir DATA --out OUT
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from transformers import Trainer, TrainingArguments

import hf_stitch
from hf_stitch.data import read_data
from hf_stitch.training import DynamicsRecorder, SimilarityCallback, StitchabilityCallback

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.around = nn.Identity() if stride == 1 else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, channels, height, width)`` to the same shape, or with stride 2 to half of height and width."""
        return functional.relu(self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))) + self.around(x))


class ResNet(nn.Module):
    """A convolution with stride 2, six residual blocks, spatial mean pooling and a linear layer: 175,066 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        widths = ((16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1))
        self.blocks = nn.ModuleList(Block(*width) for width in widths)
        self.fc = nn.Linear(64, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Map images ``(batch, 3, 32, 32)`` to logits ``(batch, 10)``, and compute the loss if labels are given."""
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        logits = self.fc(x.mean((2, 3)))
        return (
            {"logits": logits}
            if labels is None
            else {"loss": functional.cross_entropy(logits, labels), "logits": logits}
        )


def normalise(image: Image.Image) -> Tensor:
    """Convert a CIFAR image to a normalised tensor ``(3, 32, 32)``."""
    values = torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32) / 255).permute(2, 0, 1)
    return (values - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def flipped(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate a batch, and flip each image horizontally with probability 0.5."""
    images = torch.stack([row["pixel_values"] for row in rows])
    mirrored = torch.where(torch.rand(len(rows), 1, 1, 1) < 0.5, images.flip(3), images)
    return {"pixel_values": mirrored, "labels": torch.tensor([row["labels"] for row in rows])}


def main() -> None:
    """Run the experiment from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="local folder with cifar10/{train,test}.parquet; default: the Hub")
    parser.add_argument("--train", type=int, default=6000, help="number of training images")
    parser.add_argument("--probe", type=int, default=500, help="number of test images to record activations on")
    parser.add_argument("--stitch", type=int, default=2000, help="number of test images for stitching layers")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path, help="write dynamics.png and dynamics.json to this folder")
    arguments = parser.parse_args()

    train, test = (
        hf_stitch.Samples.of(read_data("uoft-cs/cifar10", data_dir=arguments.data_dir, split=split)).take(n)
        for split, n in (("train", arguments.train), ("test", arguments.probe + arguments.stitch))
    )
    probe, data = test.take(arguments.probe), test.select(range(arguments.probe, len(test)))
    rows = [
        {"pixel_values": normalise(image), "labels": label}
        for batch in train.batches(500, progress="reading")
        for image, label in zip(batch.samples, batch.labels or [], strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        reference = trainer(1, rows, arguments.epochs, folder)
        reference.train()
        watched = trainer(0, rows, arguments.epochs, folder)
        ours, theirs = (
            hf_stitch.load(t.model, example_inputs={"pixel_values": torch.randn(2, 3, 32, 32)}, processor=normalise)
            for t in (watched, reference)
        )
        recorder = DynamicsRecorder(probe, Path(folder, "recordings")).attach(watched, ours)
        callbacks = [
            SimilarityCallback("start", probe).attach(watched, ours),
            SimilarityCallback(theirs, probe).attach(watched, ours),
            StitchabilityCallback(theirs, data).attach(watched, ours),
        ]
        watched.train()
        dynamics = recorder.result()
    accuracy = {name: accuracy_of(network, data) for name, network in (("watched", ours), ("reference", theirs))}
    console = Console()
    console.print(dynamics)
    for callback in callbacks:
        table = callback.to_pandas().pivot(index="epoch", columns="figure", values="value").round(3)
        console.print(
            callback.name, table.rename(columns=lambda figure: figure.rpartition("/")[2]).to_string(), sep="\n"
        )
    console.print("accuracy", accuracy)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        dynamics.plot().savefig(arguments.out / "dynamics.png", dpi=120)
        figures = {c.name: c.to_pandas().to_dict("records") for c in callbacks}
        record = {"dynamics": dynamics.to_dict(), "settled": dynamics.settled(), "accuracy": accuracy, **figures}
        (arguments.out / "dynamics.json").write_text(json.dumps(record, indent=2) + "\n")


def trainer(seed: int, rows: list[dict[str, Tensor]], epochs: int, folder: str) -> Trainer:
    """Create a trainer for a network with random weights."""
    options = TrainingArguments(
        folder, seed=seed, num_train_epochs=epochs, per_device_train_batch_size=64, learning_rate=3e-3,
        weight_decay=0.05, warmup_steps=100, report_to=[], save_strategy="no", logging_strategy="epoch",
        remove_unused_columns=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Trainer(ResNet(), options, data_collator=flipped, train_dataset=rows)


def accuracy_of(network: hf_stitch.Adapter, data: hf_stitch.Samples) -> float:
    """Return the accuracy of a network."""
    right = 0
    with torch.no_grad():
        for batch in data.batches(500):
            predictions = network.forward(network.preprocess(batch.samples))["logits"].argmax(1)
            right += int((predictions == torch.tensor(batch.labels)).sum())
    return right / len(data)


if __name__ == "__main__":
    main()
