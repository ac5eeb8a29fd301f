"""What an artefact is, as plain values: what its card is made of, and what is shown of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hf_stitch.artefacts.files import CONFIG, STITCHER
from hf_stitch.artefacts.migrations import migrated
from hf_stitch.artefacts.record import check_counts, damaged, read_record
from hf_stitch.provenance import Method
from hf_stitch.reference import ModelReference
from hf_stitch.representation import RepresentationSpec
from hf_stitch.stitches.layer import part_widths


@dataclass(frozen=True)
class Description:
    """Both parents, the stitch between them, how it was found, and how well it does.

    Attributes:
        whole: Whether the halves are saved too: a stitched model, not a stitcher.
        source: The network that gives the front half.
        source_layer: Its cut.
        target: The network that gives the back half.
        target_layer: Its cut.
        stitch: The stitching layer, as :meth:`hf_stitch.stitches.StitchingLayer.to_dict` gives it.
        task: Which head the stitched model has.
        recipe: How the stitch was found.
        scores: What was measured on held-out samples.
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

    @property
    def widths(self) -> tuple[int, int]:
        """Features that the map of positions maps from and to."""
        source, target = (RepresentationSpec(**self.stitch[side]) for side in ("source", "target"))
        return part_widths(source, target, self.stitch["pooling"])["body"]

    @property
    def body(self) -> Mapping[str, Any]:
        """The map of positions: ``name``, options and ``fitted``."""
        found: Mapping[str, Any] = self.stitch["body"]
        return found

    @property
    def methods(self) -> tuple[Method, ...]:
        """What must be installed to load it: the maps of the stitch, and the head."""
        maps = [self.stitch[part] for part in ("body", "prefix") if self.stitch.get(part)]
        similarities = [each for one in maps for each in one.get("similarities", ()) if isinstance(each, Mapping)]
        heads = [] if self.task is None else [("heads", self.task)]
        return (
            *(("stitches", str(one["name"])) for one in maps),
            *(("similarities", str(each["name"])) for each in similarities),
            *heads,
        )

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The description of the artefact in a folder; its weights are not looked at.

        Args:
            folder: Of a stitcher or a stitched model.

        Raises:
            FileNotFoundError: If it holds neither.
            ValueError: If the record is damaged.
        """
        whole = not is_stitcher(folder)
        path = folder / (CONFIG if whole else STITCHER)
        record = read_record(path)
        check_counts(record, str(path))
        try:
            return cls.of(migrated(record, str(path)), whole=whole)
        except ValueError:
            raise
        except Exception as error:
            raise damaged(path, error) from error

    @classmethod
    def of(cls, record: Mapping[str, Any], *, whole: bool) -> Self:
        """The description in a record.

        Args:
            record: Of the present format.
            whole: Whether it is that of a stitched model.
        """
        layers = [record[side]["cut"]["layer"] if whole else record[side]["layer"] for side in ("source", "target")]
        ends = [ModelReference.from_dict(record[side]["reference"]) for side in ("source", "target")]
        found = {key: record.get(key) or {} for key in ("recipe", "scores")}
        return cls(whole, ends[0], layers[0], ends[1], layers[1], record["stitch"], record.get("task"), **found)


def is_stitcher(folder: Path) -> bool:
    """Whether a folder holds a stitcher; a stitched model otherwise.

    Args:
        folder: The folder.

    Raises:
        FileNotFoundError: If it holds neither.
    """
    if (folder / STITCHER).is_file():
        return True
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(
            f"{folder} has neither {STITCHER} nor {CONFIG}: it holds no stitcher and no stitched model"
        )
    return False
