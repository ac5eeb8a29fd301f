"""Where a stitched model and its target differ: classes that are exchanged, and single samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from hf_stitch.analysis.evaluation import Example
from hf_stitch.artefacts import StitchedModel
from hf_stitch.data import Samples
from hf_stitch.tasks.base import Answers, Array


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
        row = found.setdefault(_name(target, names), {})  # several classes may have one name
        row[_name(own, names)] = row.get(_name(own, names), 0) + count
    return found


def differing(
    predicted: Mapping[str, Answers], samples: Samples, names: Mapping[int, str], count: int
) -> tuple[Example, ...]:
    """Find the samples on which the stitched model and the target differ most."""
    if not count:
        return ()
    own, target = predicted["stitched"], predicted["target"]
    language = "tokens" in own
    losses = {who: _per_token(predicted[who]) for who in ("stitched", "target")} if language else {}
    distance = np.abs(losses["stitched"] - losses["target"]) if language else own["distance"]
    order = np.argsort(-np.nan_to_num(distance), kind="stable")[:count].tolist()
    chosen = samples.select(order)
    (batch,) = chosen.batches(len(order))

    def text(who: str, place: int) -> str:
        return f"{losses[who][place]:.3f} nats per token" if language else _name(predicted[who]["class"][place], names)

    labels = target.get("label")
    return tuple(
        Example(
            str(chosen.ids[number]), float(distance[place]), text("stitched", place), text("target", place),
            None if labels is None else _name(labels[place], names), batch.samples[number],
        )
        for number, place in enumerate(order)
    )  # fmt: skip


def _per_token(answers: Answers) -> Array:
    tokens = answers["tokens"]
    return np.divide(answers["cross_entropy"], tokens, out=np.zeros_like(tokens), where=tokens > 0)


def _name(number: float, names: Mapping[int, str]) -> str:
    return str(names.get(int(number), int(number)))
