"""Anchor sets: the identity of the anchor samples, and their representations by each encoder."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL.Image import Image, Resampling
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_stitch.adapters import Adapter, load
from hf_stitch.adapters.recording import record
from hf_stitch.data import Batch, Id, Samples, check_same_order
from hf_stitch.data.overlap import ContentSketch
from hf_stitch.options import checked
from hf_stitch.printing import warn
from hf_stitch.records import SPARSE, encode, read
from hf_stitch.reference import ModelReference
from hf_stitch.relative.projection import check_anchors
from hf_stitch.representation import Pooling
from hf_stitch.running import Processes, Run
from hf_stitch.storage.files import decoding, digest, load_whole, replacing

CONFIG = "anchors.json"
WEIGHTS = "anchors.safetensors"
FORMAT = 2


@dataclass(frozen=True, eq=False)
class EncodedAnchors:
    """Representations of the anchors by one encoder at one layer.

    Attributes:
        values: ``(k, d)``, in the order of the anchors.
        reference: The encoder with its pins: weights, config and processor.
        layer: The layer.
        pooling: The pooling that gives one vector per sample.

    Example:
        >>> import hf_stitch
        >>> data = Samples.of(torch.randn(6, 4))
        >>> encoder = hf_stitch.load(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), example_inputs=torch.randn(2, 4))
        >>> encoded = AnchorSet.of(data).encode(encoder, "1", data, progress=False).encoded[0]
        >>> encoded.layer, encoded.pooling, encoded.values.shape
        ('1', 'mean', torch.Size([6, 3]))
    """

    values: Tensor
    reference: ModelReference
    layer: str
    pooling: Pooling

    def __str__(self) -> str:
        """For example ``timm:resnet18 layer2.1 (mean)``."""
        return f"{self.reference} {self.layer} ({self.pooling})"


@dataclass(frozen=True, eq=False)
class AnchorSet:
    """Anchors to save and share: the identity of the samples, and their representations by any number of encoders.

    An encoder is identified by its pins: weights, config and processor (``adapter.pinned``). Sets of version 0.2.0 and
    earlier, and encoders of user code, are identified by the weights only. :meth:`encode` also compares representations
    of the samples, which detects differences that no pin covers.

    Two encoders of one set have comparable relative representations. If the encoders receive different samples (a text
    and its translation), use one set for each side and check with :meth:`check_parallel` that they correspond.

    Attributes:
        ids: Ids of the samples, in the order of the anchors.
        fingerprint: Hash of ids, labels and content of the samples: :attr:`hf_stitch.Samples.fingerprint`.
        encoded: The representations so far.
        contents: Hashes of the contents of the samples, by which they are recognised among others; ``None`` for sets of
            version 0.2.0 and earlier.

    Example:
        >>> import hf_stitch
        >>> data = Samples.of(torch.randn(6, 4))
        >>> encoder = hf_stitch.load(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), example_inputs=torch.randn(2, 4))
        >>> anchors = AnchorSet.of(data).encode(encoder, "1", data)
        >>> anchors
        AnchorSet(6 anchors, encoded by 1)
        >>> anchors.values(encoder, "1").shape
        torch.Size([6, 3])
    """

    ids: tuple[Id, ...]
    fingerprint: str
    encoded: tuple[EncodedAnchors, ...] = ()
    contents: ContentSketch | None = None

    @classmethod
    def of(cls, samples: Samples) -> Self:
        """Create a set without representations.

        A warning names anchors that are nearly the same image or tensor.
        """
        warn_of_near_duplicates(samples)
        return cls(samples.ids, samples.fingerprint, contents=ContentSketch.of(samples))

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"AnchorSet({len(self)} anchors, encoded by {len(self.encoded)})"

    # -- representations -------------------------------------------------------------------------------------------
    @torch.no_grad()
    @checked
    def encode(
        self,
        model: str | nn.Module | Adapter,
        layer: str,
        samples: Samples,
        pooling: Pooling = "mean",
        *,
        batch_size: int = 64,
        progress: bool = True,
    ) -> AnchorSet:
        """Return this set with the representations by one more encoder.

        If the set already contains them, the encoder is run on the first batch only and compared: networks with equal
        pins may still differ, for example in user code.

        Args:
            model: The encoder: an adapter, a module, or a name for :func:`hf_stitch.load`.
            layer: The cut.
            samples: The samples of the anchors, in their order.
            pooling: The pooling that gives one vector per sample.
            batch_size: Samples per forward pass.
            progress: Whether to show a progress bar.

        Raises:
            NotACutError: The layer is not a cut.
        """
        self.check_same(samples)
        adapter = load(model)
        reference = adapter.pinned
        if found := self._find(reference, layer, pooling):
            _check_matches(found, _vectors(adapter, layer, pooling, next(samples.batches(batch_size))))
            return self
        processes = Processes.of(None)
        run = Run(batch_size, progress=progress, processes=processes)
        with processes.together("encode"):
            encoded = record(
                samples, run, "encoding anchors", lambda batch: {"": _vectors(adapter, layer, pooling, batch)},
                f"the representations of {len(samples):,} anchors", "use fewer anchors, or another pooling",
            )  # fmt: skip
        return self.add(encoded[""], reference, layer, pooling)

    @checked
    def add(self, values: Tensor, reference: ModelReference, layer: str, pooling: Pooling = "mean") -> AnchorSet:
        """Return this set with representations that were computed before.

        Args:
            values: ``(k, d)``, in the order of the anchors; copied.
            reference: The encoder, pinned by weights, config and processor (``adapter.pinned``).
            layer: The layer.
            pooling: The pooling that was used.
        """
        if len(values) != len(self):
            raise ValueError(f"{len(self)} anchors need one representation each, got {len(values)}")
        added = EncodedAnchors(values.detach().clone(), reference, layer, pooling)
        try:
            check_anchors(values)
        except ValueError as error:
            raise ValueError(f"{added}: {error} (anchor 0 is sample {self.ids[0]!r})") from error
        if self._find(reference, layer, pooling):
            raise ValueError(f"{added} is already in this set")
        return dataclasses.replace(self, encoded=(*self.encoded, added))

    def merge(self, other: AnchorSet) -> AnchorSet:
        """Return this set with the additional representations of another set of the same anchors."""
        self.check_same(other)
        added = (each for each in other.encoded if not self._find(each.reference, each.layer, each.pooling))
        return dataclasses.replace(self, encoded=(*self.encoded, *added))

    @checked
    def has(self, model: Adapter | ModelReference, layer: str, pooling: Pooling = "mean") -> bool:
        """Whether the set contains the representations by an encoder."""
        return self._find(model.pinned if isinstance(model, Adapter) else model, layer, pooling) is not None

    @checked
    def values(self, model: Adapter | ModelReference, layer: str, pooling: Pooling = "mean") -> Tensor:
        """Return the representations of the anchors by an encoder, ``(k, d)``, in the order of the anchors."""
        reference = model.pinned if isinstance(model, Adapter) else model
        if found := self._find(reference, layer, pooling):
            return found.values
        have = ", ".join(map(str, self.encoded)) or "nothing"
        known = any(_same(each, reference, each.layer, each.pooling) for each in self.encoded)
        reason = (
            "this encoder at another layer or by another pooling"
            if known
            else "no encoder of these weights and settings"
        )
        raise ValueError(
            f"the anchors are not encoded by {reference} at {layer!r} ({pooling}); there is {reason}: {have}. Call "
            "encode"
        )

    def _find(self, reference: ModelReference, layer: str, pooling: Pooling) -> EncodedAnchors | None:
        return next((each for each in self.encoded if _same(each, reference, layer, pooling)), None)

    def check_same(self, other: Samples | AnchorSet) -> None:
        """Check that samples or another set are the same anchors, in the same order."""
        if len(other.ids) != len(self):
            raise ValueError(
                f"there are {len(self)} anchors, got {len(other.ids)}; pass the same samples in the same order"
            )
        try:
            check_same_order(self.ids, other.ids)
        except ValueError as error:
            raise ValueError(f"these are not the anchors: {error}") from error
        if other.fingerprint != self.fingerprint:
            raise ValueError(
                "these samples have the ids of the anchors but different content or labels: "
                f"{other.fingerprint}, not {self.fingerprint}; pass the samples of the anchors, or, if they "
                "correspond to them (translations), pass them as paired_anchors="
            )

    def check_parallel(self, other: Samples | AnchorSet) -> None:
        """Check that the anchors of two sides correspond: both have the same ids in the same order."""
        try:
            check_same_order(self.ids, other.ids)
        except ValueError as error:
            raise ValueError(f"these anchors are not parallel: {error}") from error

    def among(self, samples: Samples) -> list[int]:
        """Return the places of samples that are anchors, recognised by their content.

        Example:
            >>> data = Samples.of(["good", "bad", "fine"])
            >>> AnchorSet.of(data.take(2)).among(data)
            [0, 1]
        """
        if samples.fingerprint == self.fingerprint:
            return list(range(len(samples)))
        return [] if self.contents is None else self.contents.among(samples)

    # -- files ------------------------------------------------------------------------------------------------------
    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write ``anchors.json`` and ``anchors.safetensors`` to a folder.

        Paths of local models are not written; such an encoder is identified by its weights, config and processor.

        Raises:
            OSError: A file cannot be written. The previous files are unchanged then.
        """
        tensors = {str(place): each.values.cpu().contiguous() for place, each in enumerate(self.encoded)}
        encoded = tuple(_Encoder(each.reference.public, each.layer, each.pooling) for each in self.encoded)
        contents = None if self.contents is None else self.contents.to_dict()
        with replacing(Path(save_directory)) as folder:
            save_file(tensors, folder / WEIGHTS)
            config = _Config(FORMAT, self.ids, self.fingerprint, encoded, digest(folder / WEIGHTS), contents)
            (folder / CONFIG).write_text(json.dumps(encode(config), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Read a set from a folder.

        Raises:
            FileNotFoundError: A file is missing.
        """
        return load_whole(Path(folder), CONFIG, decoding(folder)(lambda: cls._load(Path(folder))))

    @classmethod
    def _load(cls, folder: Path) -> Self:
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} has no {name}: it contains no anchor set, or an incomplete one")
        config: _Config = read(_Config, json.loads((folder / CONFIG).read_text(encoding="utf-8")), str(folder / CONFIG))
        if config.format != FORMAT:
            raise ValueError(f"its format is {config.format}, and this version reads {FORMAT}")
        tensors = load_file(folder / WEIGHTS)
        if config.digest != digest(folder / WEIGHTS):
            raise ValueError(f"{WEIGHTS} was not saved with this {CONFIG}")
        if tensors.keys() != {str(place) for place in range(len(config.encoded))}:
            raise ValueError(f"{CONFIG} names {len(config.encoded)} encoders, {WEIGHTS} contains {len(tensors)}")
        contents = None if config.contents is None else ContentSketch.from_dict(config.contents)
        anchors = cls(config.ids, config.fingerprint, contents=contents)
        for place, each in enumerate(config.encoded):
            anchors = anchors.add(tensors[str(place)], each.reference, each.layer, each.pooling)  # type: ignore[assignment]
        return anchors


@dataclass(frozen=True)
class _Encoder:
    """The encoder of representations in a file."""

    reference: ModelReference
    layer: str
    pooling: Pooling


@dataclass(frozen=True)
class _Config:
    """The record of a set."""

    format: int
    ids: tuple[Id, ...]
    fingerprint: str
    encoded: tuple[_Encoder, ...]
    digest: str
    contents: dict[str, Any] | None = dataclasses.field(default=None, metadata=SPARSE)


def _vectors(adapter: Adapter, layer: str, pooling: Pooling, batch: Batch) -> Tensor:
    """Representations of some anchors by an encoder, ``(n, d)``."""
    vectors = adapter.encode(adapter.preprocess(batch.samples), layer)[layer].rows(pooling)
    if len(vectors) != len(batch.samples):
        raise ValueError(
            f"an anchor must be one vector, but pooling={pooling!r} gives {len(vectors)} at layer {layer!r} for "
            f"{len(batch.samples)} samples; use 'mean', 'cls', 'last' or 'flatten'"
        )
    return vectors.cpu()


def _check_matches(known: EncodedAnchors, vectors: Tensor) -> None:
    """Check that an encoder gives the stored representations of the first anchors, up to rounding on another device."""
    stored = known.values[: len(vectors)].cpu().double()
    away = (vectors.double() - stored).norm() if vectors.shape == stored.shape else torch.inf
    if not away <= max(1e-2, math.sqrt(torch.finfo(known.values.dtype).eps)) * stored.norm():
        raise ValueError(
            f"this encoder has the weights of {known} in this set, but gives other representations: something that its "
            "record does not pin differs, such as user code. Encode a new set with it, AnchorSet.of(samples)"
        )


def _same(encoded: EncodedAnchors, reference: ModelReference, layer: str, pooling: Pooling) -> bool:
    """Whether encoder, layer and pooling match; encoders are compared by what pins them if known."""
    have = encoded.reference
    pinned = have.weights_hash and reference.weights_hash
    matches = not have.changes(reference) if pinned else have == reference
    return matches and (encoded.layer, encoded.pooling) == (layer, pooling)


# -- near duplicates ---------------------------------------------------------------------------------------------------
SIDE = 32
"""Width and height to which images are reduced for the comparison."""

FEWEST = 64
"""Minimum number of values of a sample: with fewer, different samples are often near each other."""

NEAR = 0.1
"""Samples are nearly the same if their distance is below this share of the median distance. On CIFAR-10 and
Fashion-MNIST, different images are further apart, and images that differ in one pixel are nearer."""

_ROWS = 512


def warn_of_near_duplicates(samples: Samples) -> None:
    """Warn if two anchors are nearly the same image or tensor.

    Images are compared as grey images of 32 x 32 pixels. Texts are not compared: equal ones have equal representations,
    which is an error later.
    """
    rows = _rows(samples)
    if rows is None or len(rows) < 3:
        return
    distances = [torch.cdist(part, rows) for part in rows.split(_ROWS)]
    median = distances[0].flatten()[:: max(1, distances[0].numel() // 100_000)].median()
    nearest = torch.cat([part.topk(2, dim=1, largest=False).values[:, 1] for part in distances])
    first = int(nearest.argmin())
    if not nearest[first] < NEAR * median:
        return
    others = torch.cdist(rows[first : first + 1], rows)[0]
    others[first] = torch.inf
    warn(
        f"anchors {samples.ids[first]!r} and {samples.ids[int(others.argmin())]!r} are nearly the same sample (their "
        f"distance is {float(nearest[first] / median):.1%} of the median): one of them adds hardly anything, choose "
        "another"
    )


def _rows(samples: Samples) -> Tensor | None:
    """Return one vector per sample; ``None`` if samples are texts, small, or differ in shape."""
    if samples.modality == "text":
        return None
    rows = [_values(sample) for batch in samples.batches(_ROWS) for sample in batch.samples]
    if len({row.shape for row in rows}) > 1 or rows[0].size < FEWEST:
        return None
    found = torch.from_numpy(np.stack(rows))
    return found if bool(found.isfinite().all()) else None


def _values(sample: Any) -> np.ndarray[Any, Any]:
    if isinstance(sample, Image):
        return np.asarray(sample.convert("RGB").convert("L").resize((SIDE, SIDE), Resampling.BOX), np.float32).ravel()
    values = np.asarray(sample.detach().cpu().float() if isinstance(sample, Tensor) else sample, np.float32).ravel()
    return values[:: max(1, values.size // SIDE**2)]
