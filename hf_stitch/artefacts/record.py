"""Reading the JSON record of an artefact: JSON objects, known keys, plausible numbers of layers and classes.

A record may be untrusted. All records are read by these functions, and their fields checked by ``schema.py``.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_stitch.adapters.libraries.rebuilding import AttentionError
from hf_stitch.printing import visible
from hf_stitch.registry import PluginError, UnknownNameError

FORMAT = 2
"""The record format that this version writes."""

NEWEST = 3
"""The record format of artefacts that earlier versions would misread: networks with different tokenizers."""

MODEL_TYPE = "hf_stitch"
"""Value of ``model_type`` in the config of a stitched model."""

USAGE = "usage"
"""First key of the config of a stitched model: how to load it, for those who open the file."""

AGAIN = "save or download it again"

LARGEST = 2**24
"""Largest size of a record in bytes; JSON takes up to 20 times its size in memory."""

WEIGHT, OF_CONTAINER, DEEPEST = 2**18, 8, 100
"""Largest number of values in a record, how many values a list or an object counts as, and the deepest nesting.

A record with the names of 21,843 classes in both networks and in the model has half as many.
"""

LAYERS = re.compile(
    r"((?<!per_)(layers?|depths?|blocks?|stages?|repeats?|levels?)|blocks_per_stage|layers_per_stack|block_sizes|n_points"
    r"|hidden_groups|group_num|group_detr|codebooks|codes_total|quantizers|hash_functions|multimask_outputs|num_inputs"
    r"|feedforward_networks|upsampling_ratios|merger_times|conv_pos_embeddings|symmetric_num|num_flows"
    r"|attends_per_block|num_point_embeddings)$"
)
MOST, FEW = 1_000, 256
"""Keys of numbers of layers and other modules; the largest; and the largest without a tensor in the files for each.

These are the keys for which networks of transformers repeat modules, of all types and all keys with whole numbers.
"""

LABELS, MOST_LABELS = re.compile("(num_labels|num_classes)$"), 2**17
"""Keys of numbers of classes, which determine the length of lists of names, and the largest number."""

IMAGES, WIDEST = re.compile("((image|img)_?size|resolution|num_frames)$"), 2**13
"""Keys of sizes of images and videos, whose positions some constructors list, and the largest size."""

FREE = ("id2label", "label2id", "recipe", "scores", "files", "manifest")
"""Keys whose values are not checked, because their own keys are arbitrary."""


def read_record(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file."""
    if (size := path.stat().st_size) > LARGEST:
        raise ValueError(f"{path} has {size} bytes, and no record has more than {LARGEST}: it is damaged; {AGAIN}")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the folder is damaged: {AGAIN}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(values).__name__}; {AGAIN}")
    _check_weight(values, path)
    return values


def _check_weight(record: dict[str, Any], path: Path) -> None:
    """Raise an error if a record has so many values, or nests them so deeply, that copies of it take long."""
    weight = 0
    level: list[Any] = [record]
    for _ in range(DEEPEST):
        below = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        weight += len(below) + OF_CONTAINER * len(level)
        level = [item for item in below if isinstance(item, (dict, list))]
        if weight > WEIGHT:
            break
        if not level:
            return
    what = f"more than {WEIGHT} values" if weight > WEIGHT else f"values nested more than {DEEPEST} deep"
    raise ValueError(f"{path} has {what}, as no record has: it is damaged; {AGAIN}")


def check_counts(value: Any, where: str, key: str = "", layers: int = MOST) -> None:
    """Check that no number of layers, classes or pixels of a side is larger than in any network.

    Other sizes need no bound: a network is built without memory, and within a limited time (``skeleton.py``).
    """
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in FREE:
                check_counts(item, where, name, layers)
    elif isinstance(value, list):
        for item in value:
            check_counts(item, where, key, layers)
    elif isinstance(value, (int, float)):
        for names, most in ((LAYERS, layers), (LABELS, MOST_LABELS), (IMAGES, WIDEST)):
            if value > most and names.search(key):
                raise ValueError(
                    f"{where} is damaged: {key} is {value}, and no network with such weights has more than {most}; "
                    f"{AGAIN}"
                )


def known(record: Mapping[str, Any], names: Iterable[str], where: str) -> dict[str, Any]:
    """Drop unknown keys of a record, with a warning that names them."""
    names = set(names)
    unknown = sorted(set(record) - names)
    if unknown:
        warnings.warn(
            f"{where} has {visible(', '.join(unknown))}, which this version does not know and ignores; it was probably "
            "written by a newer version",
            stacklevel=4,
        )
    return {key: value for key, value in record.items() if key in names}


@contextmanager
def built_from(where: str | Path) -> Iterator[None]:
    """Name the record in errors of code that builds something from it."""
    try:
        yield
    except UnknownNameError as error:
        raise UnknownNameError(f"{where} names what is not installed: {error}") from error
    except (AttentionError, PluginError):
        raise
    except Exception as error:
        raise damaged(where, error) from error


def damaged(where: str | Path, error: BaseException) -> ValueError:
    """Create the error for a record from which no artefact could be built."""
    return ValueError(
        f"{where} is damaged or was written by another version ({type(error).__name__}: {error}); {AGAIN}"
    )
