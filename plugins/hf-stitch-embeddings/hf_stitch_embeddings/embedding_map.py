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
"""Input of a map: old documents (``index``), new queries (``query``), or new queries by the transposed index map."""

Side: TypeAlias = Literal["input", "old", "new"]
"""Input vectors of the map, or vectors of one encoder."""

RECORD = "embedding_map"
"""Key in the recipe of the stitcher."""
BEGIN, END = "<!-- embedding map -->", "<!-- end of embedding map -->"
"""Comments around the section of the map in the model card."""


class EmbeddingMap:
    """Map between the vectors of an old encoder with an existing index and the vectors of a new encoder.

    The map is stored as a :class:`hf_stitch.Stitcher` between vector layers. The direction determines its input:

    - ``index``: old document vectors to the new space. The index is rewritten once; queries come from the new model.
    - ``query``: new query vectors to the old space. The index stays.
    - ``adjoint``: new query vectors to the old space, by the transpose of an affine index map. The index stays. Since
      ``⟨q, Wd + b⟩ = ⟨Wᵀq, d⟩ + ⟨q, b⟩``, the ranking equals the ranking of the rewritten index without normalisation.

    If no map helps, :attr:`keeps_old` is true: old queries on the old index then have the highest recall.

    Attributes:
        stitcher: The stitcher.
        direction: Direction of the map.
        metric: Metric of the index.
        normalized: Whether outputs have length 1.
        scores: Scores on held-out pairs.

    Args:
        stitcher: A stitcher with ``embedding_map`` in its recipe; see :meth:`of`.

    Raises:
        ValueError: If the stitcher does not join vector layers, or its recipe lacks ``embedding_map``.

    Example:
        >>> from hf_stitch.stitches import LinearStitch
        >>> embedding_map = EmbeddingMap.of(LinearStitch.of(weight=torch.eye(3, 2)), direction="index")
        >>> embedding_map([[3.0, 4.0]]).round(2).tolist()
        [[0.6000000238418579, 0.800000011920929, 0.0]]
        >>> embedding_map.adjoint()([[0.0, 2.0, 5.0]]).tolist()
        [[0.0, 1.0]]
    """

    def __init__(self, stitcher: Stitcher) -> None:
        """Check and store the stitcher."""
        record = stitcher.recipe.get(RECORD)
        layer = stitcher.stitch
        if not isinstance(record, Mapping):
            raise ValueError("the stitcher is not an embedding map: its recipe lacks 'embedding_map'")
        if layer.source.layout != "bd" or layer.target.layout != "bd":
            raise ValueError(f"an embedding map must map vectors, got a stitch from {layer.source} to {layer.target}")
        for key, allowed in (("direction", Direction), ("metric", Metric)):
            check(allowed, **{key: record.get(key)})
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
        """Create an embedding map from a stitch.

        Args:
            stitch: The map.
            direction: Direction of the map.
            metric: Metric of the index; with cosine, outputs are normalised.
            recipe: Settings of the fit for the recipe of the stitcher (``matcher``, ``samples``, ``seed``, …).
            scores: Scores on held-out pairs.
            keeps_old: Whether the map stands for keeping the old model.
            input_normalized: Whether the map was fitted to unit vectors and requires them; None accepts both.
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
        in_spec, out_spec = (RepresentationSpec("bd", width) for width in (stitch.in_features, stitch.out_features))
        summaries = ("old encoder", "new encoder") if direction == "index" else ("new encoder", "old encoder")
        source, target = (ModelReference(None, "torch", summary=summary) for summary in summaries)
        layer = StitchingLayer(in_spec, out_spec, "none", stitch.float().cpu().eval())
        return cls(Stitcher(layer, source, "vectors", target, "vectors", recipe={**(recipe or {}), RECORD: record}))

    @classmethod
    @checked
    def old_model(cls, width: int, *, metric: Metric = "cosine", **options: Any) -> Self:
        """Create the map that stands for keeping the old model.

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
        """Width of the input vectors."""
        return self.stitch.in_features

    @property
    def out_features(self) -> int:
        """Width of the mapped vectors."""
        return self.stitch.out_features

    @property
    def recipe(self) -> dict[str, Any]:
        """Settings of the fit."""
        return self.stitcher.recipe

    @property
    def record(self) -> dict[str, Any]:
        """Entry of the recipe for the embedding map: direction, metric, scores, candidates."""
        record: dict[str, Any] = self.stitcher.recipe[RECORD]
        return record

    @property
    def keeps_old(self) -> bool:
        """Whether to keep the old model: the map is then the identity on *old* query vectors."""
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
            ``(n, out_features)`` float32; unit vectors if :attr:`normalized`.

        Raises:
            ValueError: If the width is wrong, an input or output row is not finite or is zero with metric cosine, or
                the lengths differ from the lengths at the fit.
        """
        rows = read_vectors(vectors)
        if rows.shape[1] != self.in_features:
            side = "old document" if self.direction == "index" else "old query" if self.keeps_old else "new query"
            hint = " (the width of its outputs: wrong side?)" if rows.shape[1] == self.out_features else ""
            raise ValueError(f"the map requires {side} vectors of width {self.in_features}, got {rows.shape[1]}{hint}")
        check_vectors(rows, metric=self.metric)
        self.check_lengths(rows)
        mapped = np.empty((len(rows), self.out_features), dtype=np.float32)
        for start in range(0, len(rows), BATCH):
            batch = torch.from_numpy(np.array(rows[start : start + BATCH], dtype=np.float32))
            outputs = self.stitch(batch).numpy()
            mapped[start : start + BATCH] = normalized(outputs) if self.normalized else outputs
        check_vectors(mapped, "the mapped vectors", metric=self.metric)
        return mapped

    @checked
    def check_lengths(self, vectors: Vectors, name: str = "these", side: Side = "input") -> None:
        """Check that the lengths of vectors match the lengths of the pairs at the fit.

        Args:
            vectors: ``(n, d)``.
            name: Name of the vectors in messages.
            side: ``"input"`` for input vectors of the map, or the encoder that computed the vectors.

        Raises:
            ValueError: If the lengths do not match. A map without recorded lengths accepts all lengths.
        """
        if side == "input":
            side = "old" if self.direction == "index" else "new"
            if self.direction == "adjoint":  # scaling a query does not change its ranking
                return
            requires_unit = self.record.get("input_normalized")
            length_range = None if requires_unit is None else (1.0, 1.0) if requires_unit else (0.0, np.inf)
        else:
            length_range = None
        length_range = (self.record.get("lengths") or {}).get(side, length_range)
        if length_range is not None:
            check_lengths(vectors, length_range, name)

    def affine(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """Return weights and bias of an affine map.

        Returns:
            Arrays ``W`` ``(out_features, in_features)`` and ``b`` ``(out_features,)``: ``W @ v + b`` is the map
            without normalisation. None if the map is not affine.
        """
        matrix = getattr(self.stitch, "matrix", None)
        if matrix is None or not self.stitch.affine:
            return None
        bias = getattr(self.stitch, "bias", None)
        bias_array = np.zeros(self.out_features, np.float32) if bias is None else bias.detach().float().numpy()
        return matrix().detach().float().numpy().copy(), bias_array.copy()

    def adjoint(self) -> EmbeddingMap:
        """Return the transposed map for new queries on the unchanged old index.

        The adjoint omits the bias, because it shifts the similarity of a query to all documents equally.

        Returns:
            The map from new query vectors to the old space.

        Raises:
            ValueError: If this is not an affine map of direction ``index``, or the metric is l2: its ranking depends on
                the lengths of mapped documents.
        """
        affine = self.affine()
        if self.direction != "index" or affine is None:
            raise ValueError(f"adjoint() requires an affine map of direction 'index', got {self!r}")
        if self.metric == "l2":
            raise ValueError("adjoint() does not support metric l2: ranking depends on the lengths of mapped documents")
        record = {key: value for key, value in self.record.items() if key not in ("direction", "normalized")}
        record |= {"scores": {}, "input_normalized": None}
        metric = record.pop("metric")
        stitch = LinearStitch.of(weight=torch.from_numpy(affine[0].T.copy()))
        stitch.fitted = dict(self.stitch.fitted)
        recipe = {key: value for key, value in self.recipe.items() if key != RECORD}
        return EmbeddingMap.of(stitch, direction="adjoint", metric=metric, recipe=recipe, **record)

    # -- saving ----------------------------------------------------------------------------------------------------
    def save_pretrained(self, folder: str | Path) -> None:
        """Save the stitcher and a model card with recipe, scores and verdict to a folder.

        Args:
            folder: The folder, created if needed. A killed process leaves the old artefact or the new one.

        Raises:
            OSError: If a file cannot be written. The previous files then stay unchanged.
        """
        folder = Path(folder)
        self.record["scores"] = self.scores
        with replacing(folder, lambda folder: stale(folder, STITCHER)) as fresh:
            card = fresh / CARD
            if (folder / CARD).is_file():  # preserves edits by users
                shutil.copyfile(folder / CARD, card)
            self.stitcher.save_pretrained(fresh)
            text = card.read_text(encoding="utf-8")
            if BEGIN in text and END in text:
                text = text[: text.index(BEGIN)].rstrip() + "\n" + text[text.index(END) + len(END) :]
            card.write_text(f"{text.rstrip()}\n\n{self.card()}\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, id_or_folder: str | Path, **download: Any) -> Self:
        """Load a map from a folder or the Hub and check all files.

        Args:
            id_or_folder: Folder or Hub id.
            **download: As for :meth:`hf_stitch.Stitcher.from_pretrained`.

        Returns:
            The map.
        """
        with decoding(id_or_folder):
            embedding_map = cls(Stitcher.from_pretrained(id_or_folder, **download))
            embedding_map.card()  # raises an error if the record is incomplete
            return embedding_map

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
        """Return the Markdown section on the embedding map for the model card."""
        inputs = {
            "index": "old document vectors, to the space of the new model",
            "query": "new query vectors, to the space of the old index",
            "adjoint": "new query vectors, to the space of the old index, by the transpose of an index map",
        }[self.direction]
        record, scores = plain(self.record), plain(self.scores)
        lead = "No map beats the old model: keep it." if self.keeps_old else f"The map applies to {inputs}."
        lines = [BEGIN, "## Embedding map", "", f"{lead} Metric: {plain(self.metric)}. Map: {plain(self.name)}.", ""]
        if verdict_sentence := (record.get("verdict") or {}).get("sentence"):
            lines += [f"**{verdict_sentence}**", ""]
        if report := scores.get("report"):
            lines += ["| on held-out pairs | value | interval |", "| --- | --- | --- |"]
            lines += [
                f"| {name}, recall@{report['k']} | {score['value']:.3f} | {score['low']:.3f} to {score['high']:.3f} |"
                for name, score in report["recall"].items()
            ]
            lines += ["", f"{report['n']} queries over {report['pool']} documents, both held out from the fit.", ""]
        lines += [
            "```python",
            "from hf_stitch_embeddings import EmbeddingMap",
            "",
            'mapped = EmbeddingMap.from_pretrained("path/to/this/folder")(vectors)',
            "```",
            END,
        ]
        return "\n".join(lines)
