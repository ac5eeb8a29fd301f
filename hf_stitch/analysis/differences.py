"""Where a stitched model and its target differ: classes that are exchanged, and single samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from hf_stitch.analysis.evaluation import Example
from hf_stitch.artefacts import StitchedModel
from hf_stitch.data import Samples
from hf_stitch.tasks.base import Answers, Task
from hf_stitch.tasks.per_sample import named


def class_names(stitched: StitchedModel, samples: Samples) -> dict[int, str]:
    """Return the names of the target's classes, from the data if the target has none, as networks of timm."""
    names = {int(number): str(name) for number, name in (stitched.config.id2label or {}).items()}
    generic = all(name == f"LABEL_{number}" for number, name in names.items())
    if generic and samples.label_names and len(samples.label_names) == stitched.config.num_labels:
        return dict(enumerate(samples.label_names))
    return names


def confused(predicted: Mapping[str, Answers], names: Mapping[int, str]) -> dict[str, dict[str, int]]:
    """Count which class the stitched model predicts where the target predicts a class."""
    classes = (predicted[who]["class"].astype(int).tolist() for who in ("target", "stitched"))
    found: dict[str, dict[str, int]] = {}
    for (target, own), count in sorted(Counter(zip(*classes, strict=True)).items()):
        row = found.setdefault(named(target, names), {})  # several classes may have one name
        row[named(own, names)] = row.get(named(own, names), 0) + count
    return found


def differing(
    task: Task, predicted: Mapping[str, Answers], samples: Samples, names: Mapping[int, str], count: int
) -> tuple[Example, ...]:
    """Find the samples on which the stitched model and the target differ most."""
    if not count:
        return ()
    own, target = predicted["stitched"], predicted["target"]
    distance = task.apart(own, target)
    order = np.argsort(-np.nan_to_num(distance), kind="stable")[:count].tolist()
    chosen = samples.select(order)
    (batch,) = chosen.batches(len(order))
    return tuple(
        Example(
            str(chosen.ids[number]), float(distance[place]), task.shown(own, place, names),
            task.shown(target, place, names), task.label_shown(target, place, names), batch.samples[number],
        )
        for number, place in enumerate(order)
    )  # fmt: skip
