"""Anchor sets: the identity of anchor samples, and their representations by each encoder."""

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
FORMAT = 2  # version of the format of the files


@dataclass(frozen=True, eq=False)
class EncodedAnchors:
    """Representations of the anchors by one encoder at one layer.

    Attributes:
        values: ``(k, d)``, in the order of the anchors.
        reference: The encoder, pinned by weights, config and processor.
        layer: The layer.
        pooling: The pooling that reduces a sample to one vector.

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
        """Return for example ``timm:resnet18 layer2.1 (mean)``."""
        return f"{self.reference} {self.layer} ({self.pooling})"


@dataclass(frozen=True, eq=False)
class AnchorSet:
    """Anchors to save and share: the identity of the samples, and their representations by any number of encoders.

    An encoder is identified by its weights, config and processor (``adapter.pinned``); in sets of version 0.2.0 and
    earlier, and for encoders of user code, by its weights only. :meth:`encode` also compares representations of the
    samples, which detects differences outside the weights and settings.

    The encoders of a set have comparable relative representations. If the encoders receive different samples (a text
    and its translation), use one set per encoder and check with :meth:`check_parallel` that the sets correspond.

    Attributes:
        ids: Ids of the samples, in the order of the anchors.
        fingerprint: Hash of ids, labels and content of the samples: :attr:`hf_stitch.Samples.fingerprint`.
        encoded: The representations.
        contents: Hashes of the contents of the samples, for recognising them in other data; ``None`` for sets of
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
        """Create a set without representations; near-duplicate images or tensors give a warning."""
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
        """Return this set with the representations by an additional encoder.

        If the set already contains them, the encoder is run on the first batch only and compared: networks with equal
        weights and settings may still differ, for example in user code.

        Args:
            model: The encoder: an adapter, a module, or a name for :func:`hf_stitch.load`.
            layer: The cut.
            samples: The samples of the anchors, in the same order.
            pooling: The pooling that reduces a sample to one vector.
            batch_size: Samples per forward pass.
            progress: Whether to show a progress bar.

        Raises:
            NotACutError: The layer is not a cut.
        """
        self.check_same(samples)
        adapter = load(model)
        reference = adapter.pinned
        if stored := self._find(reference, layer, pooling):
            _check_matches(stored, _vectors(adapter, layer, pooling, next(samples.batches(batch_size))))
            return self
        processes = Processes.of(None)
        run = Run(batch_size, progress=progress, processes=processes)
        with processes.together("encode"):
            vectors = record(
                samples, run, "encoding anchors", lambda batch: {"": _vectors(adapter, layer, pooling, batch)},
                f"the representations of {len(samples):,} anchors", "use fewer anchors, or another pooling",
            )  # fmt: skip
        return self.add(vectors[""], reference, layer, pooling)

    @checked
    def add(self, values: Tensor, reference: ModelReference, layer: str, pooling: Pooling = "mean") -> AnchorSet:
        """Return this set with additional precomputed representations.

        Args:
            values: ``(k, d)``, in the order of the anchors; copied.
            reference: The encoder, pinned by weights, config and processor (``adapter.pinned``).
            layer: The layer.
            pooling: The pooling of the representations.
        """
        if len(values) != len(self):
            raise ValueError(f"{len(self)} anchors require one representation each, got {len(values)}")
        encoding = EncodedAnchors(values.detach().clone(), reference, layer, pooling)
        try:
            check_anchors(values)
        except ValueError as error:
            raise ValueError(f"{encoding}: {error} (anchor 0 is sample {self.ids[0]!r})") from error
        if self._find(reference, layer, pooling):
            raise ValueError(f"{encoding} is already in this set")
        return dataclasses.replace(self, encoded=(*self.encoded, encoding))

    def merge(self, other: AnchorSet) -> AnchorSet:
        """Return this set with the additional representations of another set of the same anchors."""
        self.check_same(other)
        encodings = (new for new in other.encoded if not self._find(new.reference, new.layer, new.pooling))
        return dataclasses.replace(self, encoded=(*self.encoded, *encodings))

    @checked
    def has(self, model: Adapter | ModelReference, layer: str, pooling: Pooling = "mean") -> bool:
        """Return whether the set contains the representations by an encoder."""
        return self._find(model.pinned if isinstance(model, Adapter) else model, layer, pooling) is not None

    @checked
    def values(self, model: Adapter | ModelReference, layer: str, pooling: Pooling = "mean") -> Tensor:
        """Return the representations of the anchors by an encoder, ``(k, d)``, in the order of the anchors."""
        reference = model.pinned if isinstance(model, Adapter) else model
        if stored := self._find(reference, layer, pooling):
            return stored.values
        available = ", ".join(map(str, self.encoded)) or "nothing"
        contains_encoder = any(_same(encoded, reference, encoded.layer, encoded.pooling) for encoded in self.encoded)
        reason = (
            "this encoder with another layer or pooling"
            if contains_encoder
            else "only encoders with other weights or settings"
        )
        raise ValueError(
            f"the anchors are not encoded by {reference} at {layer!r} ({pooling}); the set contains {reason}: "
            f"{available}. Call encode"
        )

    def _find(self, reference: ModelReference, layer: str, pooling: Pooling) -> EncodedAnchors | None:
        return next((encoded for encoded in self.encoded if _same(encoded, reference, layer, pooling)), None)

    def check_same(self, other: Samples | AnchorSet) -> None:
        """Raise an error unless samples or another set are the same anchors in the same order."""
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
                f"{other.fingerprint}, not {self.fingerprint}; pass the samples of the anchors, or pass "
                "corresponding samples (translations) as paired_anchors="
            )

    def check_parallel(self, other: Samples | AnchorSet) -> None:
        """Raise an error unless two sets correspond: both have the same ids in the same order."""
        try:
            check_same_order(self.ids, other.ids)
        except ValueError as error:
            raise ValueError(f"these anchors are not parallel: {error}") from error

    def among(self, samples: Samples) -> list[int]:
        """Return the indices of samples that are anchors, recognised by their content.

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

        Paths of local models are not written; these encoders are identified by weights, config and processor.

        Raises:
            OSError: A file cannot be written. The previous files are unchanged then.
        """
        tensors = {str(number): stored.values.cpu().contiguous() for number, stored in enumerate(self.encoded)}
        encoded = tuple(_Encoder(stored.reference.public, stored.layer, stored.pooling) for stored in self.encoded)
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
                raise FileNotFoundError(f"{folder} does not contain {name}: it is not a complete anchor set")
        config: _Config = read(_Config, json.loads((folder / CONFIG).read_text(encoding="utf-8")), str(folder / CONFIG))
        if config.format != FORMAT:
            raise ValueError(f"its format is {config.format}, but this version reads {FORMAT}")
        tensors = load_file(folder / WEIGHTS)
        if config.digest != digest(folder / WEIGHTS):
            raise ValueError(f"{WEIGHTS} was not saved with this {CONFIG}")
        if tensors.keys() != {str(number) for number in range(len(config.encoded))}:
            raise ValueError(f"{CONFIG} names {len(config.encoded)} encoders, {WEIGHTS} contains {len(tensors)}")
        contents = None if config.contents is None else ContentSketch.from_dict(config.contents)
        anchors = cls(config.ids, config.fingerprint, contents=contents)
        for number, encoder in enumerate(config.encoded):
            values = tensors[str(number)]
            anchors = anchors.add(values, encoder.reference, encoder.layer, encoder.pooling)  # type: ignore[assignment]
        return anchors


@dataclass(frozen=True)
class _Encoder:
    """Encoder of representations in a file."""

    reference: ModelReference
    layer: str
    pooling: Pooling


@dataclass(frozen=True)
class _Config:
    """Contents of ``anchors.json``."""

    format: int
    ids: tuple[Id, ...]
    fingerprint: str
    encoded: tuple[_Encoder, ...]
    digest: str
    contents: dict[str, Any] | None = dataclasses.field(default=None, metadata=SPARSE)


def _vectors(adapter: Adapter, layer: str, pooling: Pooling, batch: Batch) -> Tensor:
    """Compute the representations of a batch of anchors by an encoder, ``(n, d)``."""
    vectors = adapter.encode(adapter.preprocess(batch.samples), layer)[layer].rows(pooling)
    if len(vectors) != len(batch.samples):
        raise ValueError(
            f"an anchor must be one vector, but pooling={pooling!r} returns {len(vectors)} vectors at layer {layer!r} "
            f"for {len(batch.samples)} samples; use 'mean', 'cls', 'last' or 'flatten'"
        )
    return vectors.cpu()


def _check_matches(encoded: EncodedAnchors, vectors: Tensor) -> None:
    """Raise an error unless an encoder returns the stored vectors of the first anchors, up to rounding error."""
    expected = encoded.values[: len(vectors)].cpu().double()
    distance = (vectors.double() - expected).norm() if vectors.shape == expected.shape else torch.inf
    if not distance <= max(1e-2, math.sqrt(torch.finfo(encoded.values.dtype).eps)) * expected.norm():
        raise ValueError(
            f"this encoder has the weights of {encoded} in this set, but returns different representations: something "
            "outside its record differs, such as user code. Encode a new set with it, AnchorSet.of(samples)"
        )


def _same(encoded: EncodedAnchors, reference: ModelReference, layer: str, pooling: Pooling) -> bool:
    """Return whether encoder, layer and pooling match; pinned encoders are compared by weights and settings."""
    pinned = encoded.reference.weights_hash and reference.weights_hash
    matches = not encoded.reference.changes(reference) if pinned else encoded.reference == reference
    return matches and (encoded.layer, encoded.pooling) == (layer, pooling)


# -- near duplicates ---------------------------------------------------------------------------------------------------
SIDE = 32
"""Width and height of images in the comparison."""

FEWEST = 64
"""Minimum number of values per sample; with fewer values, different samples are often near each other."""

NEAR = 0.1
"""Samples are near-duplicates if their distance is below this share of the median distance. On CIFAR-10 and
Fashion-MNIST, different images have larger distances, and images that differ in one pixel smaller ones."""

_ROWS = 512  # samples that are compared at a time


def warn_of_near_duplicates(samples: Samples) -> None:
    """Warn if two anchors are nearly the same image or tensor.

    Images are compared as grey images of 32 x 32 pixels. Texts are not compared: equal texts have equal
    representations, which raise an error later.
    """
    rows = _rows(samples)
    if rows is None or len(rows) < 3:
        return
    distances = [torch.cdist(chunk, rows) for chunk in rows.split(_ROWS)]
    median = distances[0].flatten()[:: max(1, distances[0].numel() // 100_000)].median()
    nearest = torch.cat([chunk.topk(2, dim=1, largest=False).values[:, 1] for chunk in distances])
    index = int(nearest.argmin())
    if not nearest[index] < NEAR * median:
        return
    to_index = torch.cdist(rows[index : index + 1], rows)[0]
    to_index[index] = torch.inf
    warn(
        f"anchors {samples.ids[index]!r} and {samples.ids[int(to_index.argmin())]!r} are nearly the same "
        f"sample (their distance is {float(nearest[index] / median):.1%} of the median); replace one of them"
    )


def _rows(samples: Samples) -> Tensor | None:
    """Return one vector per sample; ``None`` for texts, small samples and samples of different shapes."""
    if samples.modality == "text":
        return None
    rows = [_values(sample) for batch in samples.batches(_ROWS) for sample in batch.samples]
    if len({row.shape for row in rows}) > 1 or rows[0].size < FEWEST:
        return None
    matrix = torch.from_numpy(np.stack(rows))
    return matrix if bool(matrix.isfinite().all()) else None


def _values(sample: Any) -> np.ndarray[Any, Any]:
    if isinstance(sample, Image):
        return np.asarray(sample.convert("RGB").convert("L").resize((SIDE, SIDE), Resampling.BOX), np.float32).ravel()
    values = np.asarray(sample.detach().cpu().float() if isinstance(sample, Tensor) else sample, np.float32).ravel()
    return values[:: max(1, values.size // SIDE**2)]
