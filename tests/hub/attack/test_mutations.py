"""A mutated artefact is refused with a clear error, or is the model that its record describes."""

from __future__ import annotations

import logging
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_stitch
from hf_stitch.adapters.cutting.interface import MASK
from hf_stitch.registry import PluginError

from mutations import FAMILIES, copied, read, record_of  # isort: skip

PACKAGE = Path(hf_stitch.__file__).parent
CLEAR = (ValueError, OSError, PluginError)

DESCRIBES = {
    *("recipe", "scores", "requires", "reference", "half_hash", "fitted", "id2label", "label2id", "architectures"),
}
"""Parts of a record that describe a model and do not determine its outputs."""


@dataclass(frozen=True)
class Artefact:
    """A saved artefact, and how to load it and compute its output for the same inputs."""

    folder: Path
    output: Callable[[Path], torch.Tensor]


def attack(
    artefact: Artefact, family: str, seeds: range, folder: Path, others: list[Path], contact: list[str]
) -> Counter[str]:
    """Apply mutations, load each result and compare its output; fail on anything unclear or wrong."""
    expected, found = artefact.output(artefact.folder), Counter[str]()
    for seed in seeds:
        copied(artefact.folder, folder)
        way = FAMILIES[family](folder, random.Random(f"{artefact.folder.name} {family} {seed}"), others)
        about = f"{family} {seed}, {'.'.join(map(str, way)) or 'files'}"
        outcome = _outcome(artefact, folder, expected, about)
        if outcome == "other":  # whoever signs a record can describe another model, but not with these parts of it
            assert way and family != "damage" and not DESCRIBES & set(way), f"{about}: other outputs"
        assert not contact, f"{about}: {contact}"
        if family == "damage" and outcome == "same":  # the record is not signed again
            assert read(folder) == read(artefact.folder), about
        found[outcome] += 1
    return found


def _outcome(artefact: Artefact, folder: Path, expected: torch.Tensor, about: str) -> str:
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            output = artefact.output(folder)
    except CLEAR as error:
        _check_clear(error, folder, about)
        return "refused"
    except Exception as error:
        raise AssertionError(f"{about}: {error!r}") from error
    return "same" if output.shape == expected.shape and torch.equal(output, expected) else "other"


def _check_clear(error: BaseException, folder: Path, about: str) -> None:
    """Check that this package raised an error, and that its message names a file, a field or a layer."""
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    assert PACKAGE in raised.parents, f"{about}: {error!r} was raised by {raised}"
    names = (str(folder), "config", "stitcher", "record", "anchor", "source", "target", "stitch", "layer", "half")
    assert any(name in str(error) for name in names), f"{about}: {error!r} names nothing"


@pytest.fixture(scope="session")
def artefacts(images: Any, texts: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artefact]:
    from tiny_networks import LAYERS, network, stitched

    root = tmp_path_factory.mktemp("artefacts")
    pictures = torch.stack([sample["image"] for sample in images[:2]])
    words = network("bert").preprocess([sample["text"] for sample in texts[:2]])
    parts: dict[str, tuple[str, str, Any, dict[str, torch.Tensor], dict[str, Any]]] = {
        "timm": ("cnn", "cnn", images, {"pixel_values": pictures}, {}),
        "vit": ("vit", "deit", images, {"pixel_values": pictures}, {}),
        "bert": ("bert", "bert", texts, dict(words), {"pooling": "none"}),
        "llama": ("llama", "llama", texts, {k: words[k] for k in ("input_ids", MASK)}, {"matcher": "identity"}),
    }  # fmt: skip
    found, models = {}, {}
    for name, (source, target, data, inputs, options) in parts.items():
        models[name] = stitched(network(source), network(target, 1), data, (LAYERS[source], LAYERS[target]), **options)
        models[name].save_pretrained(root / name)
        found[name] = Artefact(root / name, lambda folder, inputs=inputs: _logits(folder, inputs))
    relative = hf_stitch.relative_model(
        network("cnn"), images[:12], layer="layer4.0", num_labels=5, task="image-classification", progress=False
    )
    relative.save_pretrained(root / "relative")
    found["relative"] = Artefact(root / "relative", lambda folder: _logits(folder, {"pixel_values": pictures}))
    models["timm"].stitcher.save_pretrained(root / "stitcher")
    source = models["timm"].source(x=pictures)

    def apply(folder: Path) -> torch.Tensor:
        stitcher = hf_stitch.Stitcher.from_pretrained(folder)
        str(stitcher.describe())
        return stitcher.stitch(source).values

    found["stitcher"] = Artefact(root / "stitcher", apply)
    return found


def _logits(folder: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    found: Any = hf_stitch.StitchedModel.from_pretrained(folder)(**inputs)
    assert record_of(folder).is_file()
    logits: torch.Tensor = found if isinstance(found, torch.Tensor) else found.logits  # a mutation may drop the task
    return logits


KINDS = ("timm", "vit", "bert", "llama", "relative", "stitcher")
FAST, CHEAP = 6, {"damage": 300, "hostile": 20, "random": 100}
"""Number of mutations of each family of a model, and of a stitcher, which loads at once; the slow suite has the rest of
six times as many."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [False, True], ids=["", "more"])
def test_a_mutation_is_refused_or_harmless(
    kind: str, family: str, more: bool, artefacts: dict[str, Artefact], tmp_path: Path, contact: list[str]
) -> None:
    few = CHEAP[family] if kind == "stitcher" else FAST
    seeds = range(few, 6 * few) if more else range(few)
    others = [other.folder for name, other in artefacts.items() if name != kind]
    found = attack(artefacts[kind], family, seeds, tmp_path / kind, others, contact)
    logging.getLogger(__name__).info("%s, %s: %s", kind, family, dict(found))
    least = len(seeds) / 4 if more or kind == "stitcher" else 1  # six draws are too few for a share
    assert found["refused"] >= least
