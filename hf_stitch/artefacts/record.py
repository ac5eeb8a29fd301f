"""Reading the JSON record of an artefact: JSON objects, known keys, plausible numbers of layers and classes.

A record may be untrusted. All records are read by these functions, and their fields checked by ``schema.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_stitch.adapters.libraries.rebuilding import AttentionError
from hf_stitch.printing import visible, warn
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

LAYERS = re.compile(
    r"((?<!per_)(layers?|depths?|blocks?|stages?|repeats?|levels?)|blocks_per_stage|layers_per_stack|block_sizes|n_points"
    r"|hidden_groups|group_num|group_detr|codebooks|codes_total|quantizers|hash_functions|multimask_outputs|num_inputs"
    r"|feedforward_networks|upsampling_ratios|merger_times|conv_pos_embeddings|symmetric_num|num_flows"
    r"|attends_per_block|num_point_embeddings)$"
)
MOST = 1_000
"""Keys of numbers of layers and other modules, and the largest.

These are the keys for which networks of transformers repeat modules, of all types and all keys with whole numbers.
"""

LABELS, MOST_LABELS = re.compile("(num_labels|num_classes)$"), 2**17
"""Keys of numbers of classes, which determine the length of lists of names, and the largest number."""

FREE = ("id2label", "label2id", "recipe", "scores", "files", "manifest")
"""Keys whose values are not checked, because their own keys are arbitrary."""


def read_record(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file."""
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the folder is damaged: {AGAIN}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(values).__name__}; {AGAIN}")
    return values


def check_counts(value: Any, where: str, key: str = "") -> None:
    """Check that no number of layers or classes is larger than in any network, as it is in a broken file.

    Other sizes need no bound: a network is built without memory, and compared with the headers of the files.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in FREE:
                check_counts(item, where, name)
    elif isinstance(value, list):
        for item in value:
            check_counts(item, where, key)
    elif isinstance(value, (int, float)):
        for names, most in ((LAYERS, MOST), (LABELS, MOST_LABELS)):
            if value > most and names.search(key):
                raise ValueError(f"{where} is damaged: {key} is {value}, and no network has more than {most}; {AGAIN}")


def known(record: Mapping[str, Any], names: Iterable[str], where: str) -> dict[str, Any]:
    """Drop unknown keys of a record, with a warning that names them."""
    names = set(names)
    unknown = sorted(set(record) - names)
    if unknown:
        warn(
            f"{where} has {visible(', '.join(unknown))}, which this version does not know and ignores; it was probably "
            "written by a newer version"
        )
    return {key: value for key, value in record.items() if key in names}


def check_format(record: Mapping[str, Any], where: str) -> None:
    """Check that this version reads the format of a record."""
    found = record.get("format_version", 1)
    if found not in (FORMAT, NEWEST):
        raise ValueError(
            f"{where} has format {found!r}, and this version reads {FORMAT} to {NEWEST}; "
            + ("load and save it with hf-stitch 0.2" if found == 1 else "update hf-stitch to read it")
        )


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
