"""Maps between the vectors of two encoders."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hf_stitch import ModelReference, Stitcher
from hf_stitch.artefacts.card import plain
from hf_stitch.artefacts.files import STITCHER, stale
from hf_stitch.hub import CARD
from hf_stitch.options import check, checked
from hf_stitch.representation import RepresentationSpec
from hf_stitch.stitches import IdentityStitch, LinearStitch, Stitch, StitchingLayer
from hf_stitch.storage.files import decoding, replacing
from hf_stitch_embeddings.vectors import BATCH, Metric, Vectors, check_lengths, check_vectors, normalized, read_vectors

Direction: TypeAlias = Literal["index", "query", "adjoint"]
"""What a map is applied to: old documents, or new queries; ``adjoint``: new queries, by the transposed index map."""

Side: TypeAlias = Literal["input", "old", "new"]
"""Vectors that are mapped, or those of an encoder."""

RECORD = "embedding_map"
"""Key in the recipe of the stitcher."""
BEGIN, END = "<!-- embedding map -->", "<!-- end of embedding map -->"


class EmbeddingMap:
    """A map between the vectors of an old encoder, whose index exists, and those of a new one.

    It is kept as a :class:`hf_stitch.Stitcher` between layers of vectors. What is mapped depends on the direction:

    - ``index``: old document vectors to the new space. The index is rewritten once; queries are those of the new model.
    - ``query``: new query vectors to the old space. The index stays.
    - ``adjoint``: new query vectors to the old space, by the transpose of an affine index map. The index stays. Since
      ``⟨q, Wd + b⟩ = ⟨Wᵀq, d⟩ + ⟨q, b⟩``, the ranking is that of the rewritten index before it is normalised.

    If no map helps, :attr:`keeps_old` is true: old queries over the old index then find most.

    Attributes:
        stitcher: The stitcher.
        direction: What the map is applied to.
        metric: Metric of the index.
        normalized: Whether outputs have length 1.
        scores: Scores on held-out pairs.

    Args:
        stitcher: A stitcher with ``embedding_map`` in its recipe; see :meth:`of`.

    Raises:
        ValueError: If the stitcher is not between layers of vectors, or its recipe has no ``embedding_map``.

    Example:
        >>> from hf_stitch.stitches import LinearStitch
        >>> embedding_map = EmbeddingMap.of(LinearStitch.of(weight=torch.eye(3, 2)), direction="index")
        >>> embedding_map([[3.0, 4.0]]).round(2).tolist()
        [[0.6000000238418579, 0.800000011920929, 0.0]]
        >>> embedding_map.adjoint()([[0.0, 2.0, 5.0]]).tolist()
        [[0.0, 1.0]]
    """

    def __init__(self, stitcher: Stitcher) -> None:
        """Check and keep the stitcher."""
        record = stitcher.recipe.get(RECORD)
        layer = stitcher.stitch
        if not isinstance(record, Mapping):
            raise ValueError("the stitcher is no embedding map: its recipe has no 'embedding_map'")
        if layer.source.layout != "bd" or layer.target.layout != "bd":
            raise ValueError(f"an embedding map maps vectors, got a stitch from {layer.source} to {layer.target}")
        for key, known in (("direction", Direction), ("metric", Metric)):
            check(known, **{key: record.get(key)})
        self.stitcher = stitcher
        self.direction: Direction = record["direction"]
        self.metric: Metric = record["metric"]
        self.normalized = bool(record["normalized"])
        self.scores: dict[str, Any] = dict(record.get("scores") or {})
        stitcher.stitch.eval()

    @classmethod
    @checked
    def of(
        cls,
        stitch: Stitch,
        *,
        direction: Direction = "index",
        metric: Metric = "cosine",
        recipe: Mapping[str, Any] | None = None,
        scores: Mapping[str, Any] | None = None,
        keeps_old: bool = False,
        input_normalized: bool | None = None,
        **more: Any,
    ) -> Self:
        """Make an embedding map from a stitch.

        Args:
            stitch: The map.
            direction: What it is applied to.
            metric: Metric of the index; with cosine, outputs are normalised.
            recipe: How it was fitted, for the recipe of the stitcher (``matcher``, ``samples``, ``seed``, …).
            scores: Scores on held-out pairs.
            keeps_old: Whether this stands for the old model: no map.
            input_normalized: Whether the map was fitted to vectors of length 1 and needs them; None if either will do.
            **more: Further JSON values for the record.

        Returns:
            The map.
        """
        record = {
            "direction": direction,
            "metric": metric,
            "normalized": metric == "cosine",
            "keeps_old": keeps_old,
            "input_normalized": input_normalized,
            "scores": dict(scores or {}),
            **more,
        }
        inner, outer = (RepresentationSpec("bd", width) for width in (stitch.in_features, stitch.out_features))
        ends = ("old encoder", "new encoder") if direction == "index" else ("new encoder", "old encoder")
        source, target = (ModelReference(None, "torch", summary=end) for end in ends)
        layer = StitchingLayer(inner, outer, "none", stitch.float().cpu().eval())
        return cls(Stitcher(layer, source, "vectors", target, "vectors", recipe={**(recipe or {}), RECORD: record}))

    @classmethod
    @checked
    def old_model(cls, width: int, *, metric: Metric = "cosine", **options: Any) -> Self:
        """Make the map that stands for keeping the old model.

        Args:
            width: Width of the old vectors.
            metric: Metric of the index.
            **options: ``recipe``, ``scores`` and further JSON values, as for :meth:`of`.

        Returns:
            The map: the identity on old vectors.

        Example:
            >>> EmbeddingMap.old_model(3).keeps_old
            True
        """
        return cls.of(IdentityStitch(width, width), direction="query", metric=metric, keeps_old=True, **options)

    @property
    def stitch(self) -> Stitch:
        """The map without normalisation."""
        return self.stitcher.stitch.body

    @property
    def in_features(self) -> int:
        """Width of the vectors that are mapped."""
        return self.stitch.in_features

    @property
    def out_features(self) -> int:
        """Width of the mapped vectors."""
        return self.stitch.out_features

    @property
    def recipe(self) -> dict[str, Any]:
        """How the map was fitted."""
        return self.stitcher.recipe

    @property
    def record(self) -> dict[str, Any]:
        """What the recipe says about the map as an embedding map: direction, metric, scores, candidates."""
        found: dict[str, Any] = self.stitcher.recipe[RECORD]
        return found

    @property
    def keeps_old(self) -> bool:
        """Whether the advice is to keep the old model: this map is then the identity on *old* query vectors."""
        return bool(self.record.get("keeps_old"))

    @property
    def name(self) -> str:
        """Name of the map and its direction, e.g. ``ridge, index``."""
        if self.keeps_old:
            return "old model"
        return f"{(self.recipe.get('matcher') or {}).get('name', self.stitch.name)}, {self.direction}"

    def __repr__(self) -> str:
        """Return e.g. ``EmbeddingMap(ridge, index: 384 -> 384, cosine)``."""
        return f"EmbeddingMap({self.name}: {self.in_features} -> {self.out_features}, {self.metric})"

    @torch.no_grad()
    def __call__(self, vectors: Any) -> npt.NDArray[np.float32]:
        """Map vectors, in batches.

        Args:
            vectors: ``(n, in_features)``, as for :func:`~hf_stitch_embeddings.read_vectors`; old document vectors in
                direction ``index``, otherwise new query vectors.

        Returns:
            ``(n, out_features)`` float32; of length 1 if :attr:`normalized`.

        Raises:
            ValueError: If the width is wrong, a row is not finite or zero where it must not be, before or after the
                map, or their lengths are not like those that the map was fitted to.
        """
        rows = read_vectors(vectors)
        if rows.shape[1] != self.in_features:
            side = "old document" if self.direction == "index" else "old query" if self.keeps_old else "new query"
            other = " (this is the width of its outputs: wrong side?)" if rows.shape[1] == self.out_features else ""
            raise ValueError(f"the map takes {side} vectors of width {self.in_features}, got {rows.shape[1]}{other}")
        check_vectors(rows, metric=self.metric)
        self.check_lengths(rows)
        mapped = np.empty((len(rows), self.out_features), dtype=np.float32)
        for start in range(0, len(rows), BATCH):
            batch = torch.from_numpy(np.array(rows[start : start + BATCH], dtype=np.float32))
            found = self.stitch(batch).numpy()
            mapped[start : start + BATCH] = normalized(found) if self.normalized else found
        check_vectors(mapped, "the mapped vectors", metric=self.metric)
        return mapped

    @checked
    def check_lengths(self, vectors: Vectors, name: str = "these", side: Side = "input") -> None:
        """Check that vectors have lengths like those of the pairs that the map was fitted to.

        Args:
            vectors: ``(n, d)``.
            name: What they are, for messages.
            side: Whether they are what is mapped, or vectors of the old or the new encoder.

        Raises:
            ValueError: If they have not. A map without a record of them takes all lengths.
        """
        if side == "input":
            side = "old" if self.direction == "index" else "new"
            if self.direction == "adjoint":  # scaling a query does not change its ranking
                return
            unit = self.record.get("input_normalized")
            fitted = None if unit is None else (1.0, 1.0) if unit else (0.0, np.inf)
        else:
            fitted = None
        fitted = (self.record.get("lengths") or {}).get(side, fitted)
        if fitted is not None:
            check_lengths(vectors, fitted, name)

    def affine(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """Return weights and bias of an affine map.

        Returns:
            ``(out_features, in_features)`` and ``(out_features,)``, so that ``W @ v + b`` is the map without
            normalisation; None if the map is not affine.
        """
        matrix = getattr(self.stitch, "matrix", None)
        if matrix is None or not self.stitch.affine:
            return None
        bias = getattr(self.stitch, "bias", None)
        found = np.zeros(self.out_features, np.float32) if bias is None else bias.detach().float().numpy()
        return matrix().detach().float().numpy().copy(), found.copy()

    def adjoint(self) -> EmbeddingMap:
        """Return the transposed map, for new queries over the old index as it is.

        The bias adds the same number to the similarity of a query to all documents, so the adjoint has none.

        Returns:
            The map from new query vectors to the old space.

        Raises:
            ValueError: If this is not an affine map of direction ``index``, or the metric is l2, whose ranking depends
                on the lengths of mapped documents.
        """
        affine = self.affine()
        if self.direction != "index" or affine is None:
            raise ValueError(f"only an affine map of direction 'index' has an adjoint, not {self!r}")
        if self.metric == "l2":
            raise ValueError("with metric l2, ranking depends on the lengths of mapped documents: no adjoint")
        record = {key: value for key, value in self.record.items() if key not in ("direction", "normalized")}
        record |= {"scores": {}, "input_normalized": None}
        metric = record.pop("metric")
        stitch = LinearStitch.of(weight=torch.from_numpy(affine[0].T.copy()))
        stitch.fitted = dict(self.stitch.fitted)
        recipe = {key: value for key, value in self.recipe.items() if key != RECORD}
        return EmbeddingMap.of(stitch, direction="adjoint", metric=metric, recipe=recipe, **record)

    # -- saving ----------------------------------------------------------------------------------------------------
    def save_pretrained(self, folder: str | Path) -> None:
        """Write the stitcher and a model card with recipe, scores and verdict to a folder.

        Args:
            folder: The folder, created if needed. A killed process leaves the old artefact or the new one.

        Raises:
            OSError: If a file cannot be written. The previous files are unchanged then.
        """
        folder = Path(folder)
        self.record["scores"] = self.scores
        with replacing(folder, lambda folder: stale(folder, STITCHER)) as fresh:
            card = fresh / CARD
            if (folder / CARD).is_file():  # what a person added to it is kept
                shutil.copyfile(folder / CARD, card)
            self.stitcher.save_pretrained(fresh)
            text = card.read_text(encoding="utf-8")
            if BEGIN in text and END in text:
                text = text[: text.index(BEGIN)].rstrip() + "\n" + text[text.index(END) + len(END) :]
            card.write_text(f"{text.rstrip()}\n\n{self.card()}\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, id_or_folder: str | Path, **download: Any) -> Self:
        """Load a map from a folder or the Hub; all files are checked.

        Args:
            id_or_folder: Folder or Hub id.
            **download: As for :meth:`hf_stitch.Stitcher.from_pretrained`.

        Returns:
            The map.
        """
        with decoding(id_or_folder):
            found = cls(Stitcher.from_pretrained(id_or_folder, **download))
            found.card()  # its parts of the record are those of a map
            return found

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Upload the map with its card.

        Args:
            repo_id: Id of the repository.
            **options: As for :meth:`hf_stitch.Stitcher.push_to_hub`.

        Returns:
            The commit.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            text = (Path(folder) / CARD).read_text(encoding="utf-8")
        return self.stitcher.push_to_hub(repo_id, tags=("embedding-upgrade",), present=text, **options)

    def card(self) -> str:
        """Return the section on the embedding map for the model card, as Markdown."""
        applied = {
            "index": "old document vectors, to the space of the new model",
            "query": "new query vectors, to the space of the old index",
            "adjoint": "new query vectors, to the space of the old index, by the transpose of an index map",
        }[self.direction]
        record, scores = plain(self.record), plain(self.scores)
        what = "No map found more than the old model: keep it." if self.keeps_old else f"The map applies to {applied}."
        lines = [BEGIN, "## Embedding map", "", f"{what} Metric: {plain(self.metric)}. Map: {plain(self.name)}.", ""]
        if verdict := (record.get("verdict") or {}).get("sentence"):
            lines += [f"**{verdict}**", ""]
        if report := scores.get("report"):
            lines += ["| on held-out pairs | value | interval |", "| --- | --- | --- |"]
            lines += [
                f"| {name}, recall@{report['k']} | {score['value']:.3f} | {score['low']:.3f} to {score['high']:.3f} |"
                for name, score in report["recall"].items()
            ]
            lines += ["", f"{report['n']} queries over {report['pool']} documents; neither was used for the fit.", ""]
        lines += [
            "```python",
            "from hf_stitch_embeddings import EmbeddingMap",
            "",
            'mapped = EmbeddingMap.from_pretrained("path/to/this/folder")(vectors)',
            "```",
            END,
        ]
        return "\n".join(lines)
