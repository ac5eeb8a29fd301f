"""Inputs that newcomers pass and that used to end in an error, or in advice that led nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from hf_stitch import Samples

# -- data as people hold them ------------------------------------------------------------------------------------------

ROWS = torch.arange(24.0).reshape(6, 4)
LABELS = [0, 1, 2, 0, 1, 2]


class Items(Dataset[Any]):
    """A data set of user code."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.reads = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        self.reads += 1
        return self.items[place]


PAIRS = list(zip(ROWS, LABELS, strict=True))
HELD: dict[str, Callable[[], Any]] = {
    "a list of pairs": lambda: PAIRS,
    "a list of pairs with labels as tensors": lambda: [(x, torch.tensor(y)) for x, y in PAIRS],
    "a list of lists with labels of numpy": lambda: [[x.numpy(), np.int64(y)] for x, y in PAIRS],
    "a TensorDataset": lambda: TensorDataset(ROWS, torch.tensor(LABELS)),
    "a subset": lambda: Subset(TensorDataset(ROWS, torch.tensor(LABELS)), range(6)),
    "user code": lambda: Items(PAIRS),
    "user code of dictionaries": lambda: Items([{"x": x, "label": y} for x, y in PAIRS]),
    "two data sets": lambda: ConcatDataset([Items(PAIRS[:2]), Items(PAIRS[2:])]),
    "a loader": lambda: DataLoader(Items(PAIRS), batch_size=4, drop_last=True),
    "a loader of single samples": lambda: DataLoader(TensorDataset(ROWS, torch.tensor(LABELS)), batch_size=None),
}


@pytest.mark.parametrize("how", HELD)
def test_samples_with_labels_are_taken_as_they_are_held(how: str) -> None:
    samples = Samples.of(HELD[how]())
    assert (samples.modality, samples.labels, samples.ids) == ("tensor", LABELS, tuple(range(6)))
    read = [sample for batch in samples.batches(4) for sample in batch.samples]
    assert torch.equal(torch.stack([torch.as_tensor(sample) for sample in read]), ROWS)
    assert samples.content_hashes == Samples.of(ROWS).content_hashes


def test_samples_without_labels_and_pairs_of_texts_stay_what_they_are() -> None:
    for data in (TensorDataset(ROWS), Subset(TensorDataset(ROWS), range(6)), DataLoader(Items(list(ROWS)))):
        assert (Samples.of(data).labels, Samples.of(data).modality) == (None, "tensor")
    pairs = [("a premise", "a claim"), ("another", "one more")]
    labelled = Samples.of([(pair, label) for label, pair in enumerate(pairs)])
    assert next(labelled.batches(2)).samples == next(Samples.of(pairs).batches(2)).samples == pairs
    assert labelled.labels == [0, 1]


def test_an_image_folder_keeps_its_names_of_classes() -> None:
    folder = Items([(Image.new("RGB", (2, 2), shade), shade % 2) for shade in range(4)])
    folder.classes = ["dark", "light"]
    samples = Samples.of(folder)
    assert (samples.modality, samples.label_names, samples.labels) == ("image", ("dark", "light"), [0, 1, 0, 1])
    assert samples.select([3]).labels == [1]


class Augmented(Items):
    def __getitem__(self, place: int) -> Any:
        x, y = super().__getitem__(place)
        return x + torch.rand(()), y


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(PAIRS)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (lambda: DataLoader(Items(PAIRS), shuffle=True), ValueError, r"shuffles.*pass its data set, loader\.dataset"),
        (
            lambda: DataLoader(Items(PAIRS), sampler=torch.utils.data.SubsetRandomSampler([1, 0])),
            ValueError,
            "order of the loader is that of SubsetRandomSampler, which cannot be checked: pass its data set",
        ),
        (
            lambda: DataLoader(Items(PAIRS), collate_fn=lambda items: items),
            ValueError,
            "collates items by a function of its own.*pass its data set",
        ),
        (lambda: DataLoader(Stream()), ValueError, "has no items by number.*as a list of its items"),
        (Stream, TypeError, r"Stream has no items by number.*list\(dataset\)"),
        (lambda: Augmented(PAIRS), ValueError, "item 0 of Augmented differs when it is read again.*augmentation"),
        (lambda: Items([]), ValueError, "the data is empty"),
        (lambda: Items([PAIRS[0], ROWS[0]]), ValueError, r"item 1 of the data set has samples \(tensor\), but item 0"),
        (
            lambda: TensorDataset(ROWS, ROWS),
            ValueError,
            r"integer labels of shape \(n,\), got \(6, 4\) float32, \(6, 4\) float32: pass Samples\.of\(samples, label",
        ),
        (lambda: [PAIRS[0], ROWS[0]], ValueError, "sample 1 must be a pair of a sample and an integer label, as sampl"),
        (lambda: [("a text", 0.5)], ValueError, r"'samples' \(tuple\)"),
    ],
)
def test_data_without_a_known_order_or_form_are_refused(
    data: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Samples.of(data())


def test_items_are_read_when_they_are_needed() -> None:
    items = Items(PAIRS)
    samples = Samples.of(items)
    once = items.reads
    assert samples.labels == LABELS and items.reads == once
    next(samples.take(2).batches(2))
    assert items.reads == once + 2
