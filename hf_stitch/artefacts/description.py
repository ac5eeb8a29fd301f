"""Description of an artefact as plain values, for its model card and for ``hf-stitch layers``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hf_stitch.artefacts.files import CONFIG, STITCHER, record_name
from hf_stitch.artefacts.record import (
    SIDES,
    built_from,
    layer_name,
    nested_config,
    read_config,
    read_model,
    read_record,
    read_stitcher,
)
from hf_stitch.provenance import Method
from hf_stitch.reference import ModelReference
from hf_stitch.registry import registries
from hf_stitch.representation import RepresentationSpec
from hf_stitch.stitches.layer import part_widths
from hf_stitch.storage.files import decoding


@dataclass(frozen=True)
class Description:
    """Description of a stitcher or stitched model: both networks, the stitching layer, its recipe and its scores.

    Attributes:
        whole: Whether the artefact is a stitched model, which includes both halves, or a stitcher.
        source: Reference to the network of the front half.
        source_layer: The cut of the source.
        target: Reference to the network of the back half.
        target_layer: The cut of the target.
        stitch: The stitching layer, as returned by :meth:`hf_stitch.stitches.StitchingLayer.to_dict`.
        task: Task of the head; ``None`` for a model without a head.
        recipe: How the stitching layer was fitted.
        scores: Scores on held-out samples.
        modality: Modality of a sample: ``image``, ``text`` or ``tensor``; for a stitcher, ``text`` or empty.

    Example:
        >>> import tempfile
        >>> import hf_stitch
        >>> from hf_stitch.stitches import LinearStitch, StitchingLayer
        >>> spec = RepresentationSpec("bd", 8)
        >>> layer = StitchingLayer(spec, spec, "none", LinearStitch(8, 8))
        >>> a, b = ModelReference("alice/a", "transformers"), ModelReference("alice/b", "transformers")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hf_stitch.Stitcher(layer, a, "blocks.1", b, "blocks.2").save_pretrained(folder)
        ...     described = Description.read(Path(folder))
        >>> described.source.id, described.source_layer, described.widths, described.body["name"]
        ('alice/a', 'blocks.1', (8, 8), 'linear')
    """

    whole: bool
    source: ModelReference
    source_layer: str
    target: ModelReference
    target_layer: str
    stitch: Mapping[str, Any]
    task: str | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Any] = field(default_factory=dict)
    modality: str = ""

    @property
    def widths(self) -> tuple[int, int]:
        """Input and output width of the map of positions, or of the pooled vectors."""
        source, target = (RepresentationSpec(**self.stitch[side]) for side in SIDES)
        return part_widths(source, target, self.stitch["pooling"])["body"]

    @property
    def body(self) -> Mapping[str, Any]:
        """The record of the map of positions, or of the pooled vectors: ``name``, options and ``fitted``."""
        body: Mapping[str, Any] = self.stitch["body"]
        return body

    @property
    def methods(self) -> tuple[Method, ...]:
        """The registered methods required to load the artefact: maps, similarities and the head."""
        maps = [self.stitch[part] for part in ("body", "prefix") if self.stitch.get(part)]
        similarities = [name for record in maps for name in record.get("similarities", ()) if isinstance(name, Mapping)]
        tasks = [] if self.task is None else [("tasks", self.task)]
        return (
            *(("stitches", str(record["name"])) for record in maps),
            *(("similarities", str(similarity["name"])) for similarity in similarities),
            *tasks,
        )

    @property
    def pipeline(self) -> str:
        """The transformers pipeline for the stitched model; empty without a pipeline, or if the task is missing."""
        if self.task not in registries.tasks:
            return ""
        pipelines = registries.tasks.get(str(self.task)).pipelines
        return str(pipelines.get(self.modality, pipelines.get("", "")))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the description of the artefact in a folder, without its weights.

        Args:
            folder: Folder of a stitcher or a stitched model.
        """
        whole = not is_stitcher(folder)
        path = folder / (CONFIG if whole else STITCHER)
        with decoding(path):
            record = read_config(path) if whole else read_record(path)
            values = (read_model if whole else read_stitcher)(record, str(path))
            with built_from(path):
                return cls.of(values, whole=whole)

    @classmethod
    def of(cls, record: Mapping[str, Any], *, whole: bool) -> Self:
        """Build a description from a record.

        Args:
            record: A record in the current format.
            whole: Whether the record belongs to a stitched model.
        """
        layers = [_layer(record[side]) if whole else record[side]["layer"] for side in SIDES]
        references = [ModelReference.from_dict(record[side]["reference"]) for side in SIDES]
        recipe, scores = (record.get(key) or {} for key in ("recipe", "scores"))
        spec = record["stitch"]["source"]
        is_text = spec["layout"] == "bnd" and not spec["grid"]
        modality = record["source"]["interface"]["modality"] if whole else "text" if is_text else ""
        both_ends = (references[0], layers[0], references[1], layers[1], record["stitch"])
        return cls(whole, *both_ends, record.get("task"), recipe, scores, modality)


def _layer(half: Mapping[str, Any]) -> str:
    inner, layer = nested_config(half), str(half["cut"]["layer"])
    return layer if inner is None else layer_name(layer, inner)


def is_stitcher(folder: Path) -> bool:
    """Return whether a folder contains a stitcher rather than a stitched model."""
    return record_name(folder) == STITCHER
