"""The anchors: which samples they are, and what each encoder says of them."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_stitch.adapters import Adapter, load
from hf_stitch.data import Batch, Id, Samples, check_same_order
from hf_stitch.reference import ModelReference
from hf_stitch.relative.projection import check_anchors
from hf_stitch.representation import Pooling, pooling_from_1

CONFIG = "anchors.json"
WEIGHTS = "anchors.safetensors"
FORMAT = 2


@dataclass(frozen=True, eq=False)
class EncodedAnchors:
    """What one encoder says of the anchors at one layer.

    Attributes:
        values: ``(k, d)``, in the order of the anchors.
        reference: The encoder; its weights' hash tells it from others.
        layer: The layer.
        pooling: The pooling that gives a sample one vector.
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
    """Anchors, to be kept and shared: the samples' identity, and their representations by any number of encoders.

    An encoder is known by the hash of its weights, which says nothing of what else it is (its activations, its
    preprocessing); where samples are at hand, :meth:`encode` compares.

    Two encoders of one set have comparable relative representations. Where the encoders see different samples (a text
    and its translation), each side has a set of its own, and :meth:`check_parallel` makes sure that they correspond.

    Attributes:
        ids: Of the samples, in the order of the anchors.
        fingerprint: Of these samples, ids, labels and content: :attr:`hf_stitch.Samples.fingerprint`.
        encoded: The representations so far.

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

    @classmethod
    def of(cls, samples: Samples) -> Self:
        """The set of these samples, not encoded yet (:func:`hf_stitch.relative.select_anchors` chooses some)."""
        return cls(samples.ids, samples.fingerprint)

    def __len__(self) -> int:
        """Number of anchors."""
        return len(self.ids)

    def __repr__(self) -> str:
        """Number of anchors and of encoders."""
        return f"AnchorSet({len(self)} anchors, encoded by {len(self.encoded)})"

    # -- what encoders say of them ----------------------------------------------------------------------------------
    @torch.no_grad()
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
        """This set with the representations of one more encoder.

        One that is there already is run on the first batch only, and compared: networks of equal weights may differ
        in an activation, the size of images or a tokenizer.

        Args:
            model: The encoder: an adapter, a live module, or a name for :func:`hf_stitch.load`.
            layer: Its cut.
            samples: The anchors themselves, in their order.
            pooling: Which vector stands for a sample.
            batch_size: Samples per forward.
            progress: Show a progress bar.

        Raises:
            NotACutError: If the layer is no cut.
            ValueError: If the samples are others than the anchors or in another order, the policy gives a sample
                several rows, or representations repeat, are all equal, or are not those that are here already.
        """
        self.check_same(samples)
        adapter = load(model)
        reference = adapter.pinned
        if found := self._find(reference, layer, pooling):
            _check_says(found, _vectors(adapter, layer, pooling, next(samples.batches(batch_size))))
            return self
        batches = samples.batches(batch_size, "encoding anchors" if progress else None)
        return self.add(
            torch.cat([_vectors(adapter, layer, pooling, batch) for batch in batches]), reference, layer, pooling
        )

    def add(self, values: Tensor, reference: ModelReference, layer: str, pooling: Pooling = "mean") -> AnchorSet:
        """This set with representations that were made before.

        Args:
            values: ``(k, d)``, in the order of the anchors; copied.
            reference: The encoder, pinned by the hash of its weights (``adapter.pinned``).
            layer: The layer.
            pooling: The pooling by which they were made.

        Raises:
            ValueError: If their number is not that of the anchors, they repeat or are all equal, or this encoder's
                layer is there already.
        """
        if len(values) != len(self):
            raise ValueError(f"{len(self)} anchors need as many representations, got {len(values)}")
        added = EncodedAnchors(values.detach().clone(), reference, layer, pooling)
        try:
            check_anchors(values)
        except ValueError as error:
            raise ValueError(f"{added}: {error} (anchor 0 is sample {self.ids[0]!r})") from error
        if self._find(reference, layer, pooling):
            raise ValueError(f"{added} is in this set already")
        return dataclasses.replace(self, encoded=(*self.encoded, added))

    def merge(self, other: AnchorSet) -> AnchorSet:
        """This set with what another set of the same anchors holds beside.

        Raises:
            ValueError: If the anchors are not the same (:meth:`check_same`).
        """
        self.check_same(other)
        added = (each for each in other.encoded if not self._find(each.reference, each.layer, each.pooling))
        return dataclasses.replace(self, encoded=(*self.encoded, *added))

    def has(self, model: Adapter | ModelReference, layer: str, pooling: Pooling = "mean") -> bool:
        """Whether an encoder's representations are here; arguments as of :meth:`values`."""
        return self._find(model.pinned if isinstance(model, Adapter) else model, layer, pooling) is not None

    def values(self, model: Adapter | ModelReference, layer: str, pooling: Pooling = "mean") -> Tensor:
        """What an encoder says of the anchors, ``(k, d)``.

        Args:
            model: The encoder, or its pinned reference.
            layer: The layer.
            pooling: The pooling.

        Raises:
            ValueError: If this set has not been encoded so; the message lists how it has been.
        """
        reference = model.pinned if isinstance(model, Adapter) else model
        if found := self._find(reference, layer, pooling):
            return found.values
        have = ", ".join(map(str, self.encoded)) or "nothing"
        known = any(_same(each, reference, each.layer, each.pooling) for each in self.encoded)
        reason = "this encoder at another layer or by another pooling" if known else "no encoder of these weights"
        raise ValueError(
            f"the anchors are not encoded by {reference} at {layer!r} ({pooling}); there is {reason}: {have}. Call encode"
        )

    def _find(self, reference: ModelReference, layer: str, pooling: Pooling) -> EncodedAnchors | None:
        return next((each for each in self.encoded if _same(each, reference, layer, pooling)), None)

    def check_same(self, other: Samples | AnchorSet) -> None:
        """Make sure that these are the anchors: the same samples, in the same order.

        Raises:
            ValueError: If they are more or fewer, in another order, or others; the message says which.
        """
        if len(other.ids) != len(self):
            raise ValueError(
                f"there are {len(self)} anchors, got {len(other.ids)}: what follows takes as many similarities; give "
                "the same samples in the same order"
            )
        try:
            check_same_order(self.ids, other.ids)
        except ValueError as error:
            raise ValueError(f"these are not the anchors: {error}") from error
        if other.fingerprint != self.fingerprint:
            raise ValueError(
                "these samples have the ids of the anchors but other content or labels: "
                f"{other.fingerprint}, not {self.fingerprint}; give the anchors' own, or, where a sample here stands "
                "for one there (a translation), say that they are parallel"
            )

    def check_parallel(self, other: Samples | AnchorSet) -> None:
        """Make sure that anchor i here and anchor i there correspond: both have the same ids in the same order.

        Raises:
            ValueError: If they do not; the message shows the first difference.
        """
        try:
            check_same_order(self.ids, other.ids)
        except ValueError as error:
            raise ValueError(f"these anchors are not parallel: {error}") from error

    # -- files ------------------------------------------------------------------------------------------------------
    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write ``anchors.json`` and ``anchors.safetensors`` to a folder, created if needed.

        Paths of local folders are not written; such an encoder is known by the hash of its weights.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {str(place): each.values.cpu().contiguous() for place, each in enumerate(self.encoded)}
        save_file(tensors, folder / WEIGHTS)
        encoded = [
            {"reference": e.reference.public.to_dict(), "layer": e.layer, "pooling": e.pooling} for e in self.encoded
        ]
        config = {"format": FORMAT, "ids": list(self.ids), "fingerprint": self.fingerprint, "encoded": encoded}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Read a set from a folder, strictly.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If a file is damaged, or both disagree.
        """
        folder = Path(folder)
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} has no {name}: it holds no saved anchors, or not all of them")
        try:
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            if config["format"] not in (1, FORMAT):
                raise ValueError(f"its format is {config['format']}, and this version reads 1 to {FORMAT}")
            tensors = load_file(folder / WEIGHTS)
            if tensors.keys() != {str(place) for place in range(len(config["encoded"]))}:
                raise ValueError(f"{CONFIG} names {len(config['encoded'])} encoders, {WEIGHTS} holds {len(tensors)}")
            anchors = cls(tuple(config["ids"]), config["fingerprint"])
            for place, each in enumerate(map(pooling_from_1, config["encoded"])):
                reference = ModelReference.from_dict(each["endpoint" if config["format"] == 1 else "reference"])
                anchors = anchors.add(tensors[str(place)], reference, each["layer"], each["pooling"])  # type: ignore[assignment]
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ValueError(f"the anchors in {folder} cannot be read: {error}; save or download them again") from error
        return anchors


def _vectors(adapter: Adapter, layer: str, pooling: Pooling, batch: Batch) -> Tensor:
    """What an encoder says of some anchors, ``(n, d)``."""
    vectors = adapter.encode(adapter.preprocess(batch.samples), layer)[layer].rows(pooling)
    if len(vectors) != len(batch.samples):
        raise ValueError(
            f"an anchor is one vector, and pooling={pooling!r} gives layer {layer!r} {len(vectors)} for "
            f"{len(batch.samples)} samples; use 'mean', 'cls', 'last' or 'flatten'"
        )
    return vectors.cpu()


def _check_says(known: EncodedAnchors, vectors: Tensor) -> None:
    """Make sure that an encoder says of the first anchors what is known, up to rounding on another device."""
    stored = known.values[: len(vectors)].cpu().double()
    away = (vectors.double() - stored).norm() if vectors.shape == stored.shape else torch.inf
    if not away <= max(1e-2, math.sqrt(torch.finfo(known.values.dtype).eps)) * stored.norm():
        raise ValueError(
            f"this encoder has the weights of {known} in this set, and says otherwise of the anchors: its activations, "
            "the size of its images or its tokenizer differ. Encode a new set with it, AnchorSet.of(samples)"
        )


def _same(encoded: EncodedAnchors, reference: ModelReference, layer: str, pooling: Pooling) -> bool:
    """Whether these are of that encoder, layer and policy; weights tell encoders apart wherever their hash is known."""
    have = encoded.reference
    pinned = have.weights_hash and reference.weights_hash
    alike = have.weights_hash == reference.weights_hash if pinned else have == reference
    return alike and (encoded.layer, encoded.pooling) == (layer, pooling)
