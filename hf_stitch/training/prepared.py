"""Training inputs of stitches: activations, logits and labels of the frozen networks, computed once."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_stitch.adapters import Adapter
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Batch, PairedSamples, Samples
from hf_stitch.printing import warn
from hf_stitch.representation import Representation, concatenate
from hf_stitch.running import Processes, Run
from hf_stitch.storage.tensors import RowStore
from hf_stitch.tasks.base import IGNORED, logits_of
from hf_stitch.tasks.heads import task_named

FEATURES = "features"
"""Name of the activations of the target at its last cut, if final features are matched."""
Augment = Callable[[list[Any], torch.Generator], list[Any]]
"""Function from raw samples and a generator to augmented samples, called again for every batch."""


@dataclass(frozen=True)
class PreparedBatch:
    """A batch of samples as the training loop uses it."""

    activations: Mapping[str, Representation]  # ``source/<stitch>``, of the target ``there/<layer>``, FEATURES
    answers: Mapping[str, Tensor]  # labels by kind

    @property
    def count(self) -> int:
        """Number of samples."""
        return next(iter(self.activations.values())).batch

    def to(self, device: torch.device) -> PreparedBatch:
        """Return the batch on a device."""
        activations = {name: values.to(device) for name, values in self.activations.items()}
        return PreparedBatch(activations, {name: answer.to(device) for name, answer in self.answers.items()})


class Networks:
    """Frozen networks around the stitches, which compute activations and labels of samples."""

    def __init__(
        self,
        models: Mapping[str, StitchedModel],
        target: Adapter | None,
        source: Adapter | None,
        requested: frozenset[str],
        last: str,
    ) -> None:
        self.models, self.target, self.source, self.requested, self.last = models, target, source, requested, last
        self.first = next(iter(models.values()))
        self.task = task_named(self.first.task)
        starts: dict[str, str] = {}
        self.origins = {
            name: starts.setdefault(_start(model), name) for name, model in models.items()
        }  # key of a front
        self.fronts = {name: models[name] for name in starts.values()}  # one model for each distinct front half

    def only(self, names: Sequence[str]) -> Networks:
        """Return the networks around some of the stitches."""
        some = copy.copy(self)
        some.models = {name: self.models[name] for name in names}
        some.first = self.models[names[0]]
        some.origins = {name: self.origins[name] for name in names}
        some.fronts = {name: self.fronts[name] for name in dict.fromkeys(some.origins.values())}
        return some

    def select(self, batch: PreparedBatch) -> PreparedBatch:
        """Return a batch with only the activations that these stitches need."""
        names = {FEATURES, *(f"source/{name}" for name in self.fronts), *(f"there/{end}" for end in self.ends)}
        return replace(batch, activations={name: values for name, values in batch.activations.items() if name in names})

    @property
    def ends(self) -> set[str]:
        """The cuts of the target."""
        return {model.target.cut.layer for model in self.models.values()}

    def has_predictions(self, batch: Batch) -> bool:
        """Return whether a batch has at least one token with a prediction."""
        return bool((self.task.asked(self.first, batch.samples, self.labels_of(batch)) != IGNORED).any())

    def labels_of(self, batch: Batch) -> Sequence[Any] | None:
        """Return the labels of a batch if hard labels of the data are needed, else ``None``."""
        return self.task.labels(batch) if "hard" in self.requested else None

    @torch.no_grad()
    def prepare(self, samples: Sequence[Any], others: Sequence[Any], labels: Sequence[Any] | None) -> PreparedBatch:
        """Compute activations and labels of raw samples."""
        activations: dict[str, Representation] = {}
        for name, stitched in self.fronts.items():
            inputs = self.task.inputs(stitched, samples)
            activations[f"source/{name}"] = stitched.source(**stitched.source_inputs(inputs))
        answers: dict[str, Tensor] = {}
        if "hard" in self.requested or self.task.per_token:
            answers["hard"] = self.task.asked(self.first, samples, labels)
        if "source" in self.requested:
            assert self.source is not None
            answers["source"] = logits_of(self.source.forward(self.task.inputs(self.source, samples)))
        if self.target is not None:
            inputs = self.task.inputs(self.target, others)
            if "target" in self.requested:
                answers["target"] = logits_of(self.target.forward(inputs))
            layers = {f"there/{end}": end for end in sorted(self.ends)} if "there" in self.requested else {}
            layers |= {FEATURES: self.last} if FEATURES in self.requested else {}
            encoded = self.target.encode(inputs, sorted({*layers.values()})) if layers else {}
            activations |= {name: encoded[layer] for name, layer in layers.items()}
        return PreparedBatch({name: values.replace(context={}) for name, values in activations.items()}, answers)


class Prepared:
    """Prepared samples, cached in files if they fit and recomputed for each batch otherwise.

    Activations and labels of the frozen networks are computed once and read from memory-mapped files; each process
    computes a part. They are recomputed for each batch if samples are augmented, or if the files would exceed ``limit``
    bytes (with a warning).
    """

    def __init__(
        self,
        networks: Networks,
        samples: Samples,
        others: Samples,
        *,
        folder: Path,
        augment: Augment | None,
        limit: int,
        batch_size: int,
        processes: Processes,
        progress: str | None,
        in_step: bool = False,
    ) -> None:
        self.in_step = in_step
        self.networks, self.samples, self.others = networks, samples, others
        self._augment = augment
        self._parts: list[dict[str, RowStore]] = []
        self._starts = torch.zeros(0, dtype=torch.long)
        self._like: PreparedBatch | None = None
        if augment is None:
            self._keep(folder, limit // processes.count, batch_size, processes, progress)

    @property
    def kept(self) -> bool:
        """Whether all tensors are read from files."""
        return bool(self._parts)

    def only(self, names: Sequence[str]) -> Prepared:
        """Return the same samples, prepared for some of the stitches."""
        some = copy.copy(self)
        some.networks = self.networks.only(names)
        some._like = None if self._like is None else some.networks.select(self._like)
        return some

    def read(self, indices: Tensor, seed: int) -> PreparedBatch:
        """Read a batch."""
        if self.kept:
            return self._from_files(indices)
        batch, paired = self._raw(indices)
        samples, others = batch.samples, paired.samples
        if self._augment is not None:
            samples = self._augment(samples, torch.Generator().manual_seed(seed))
            others = samples if self.others is self.samples else others
        return self.networks.prepare(samples, others, self.networks.labels_of(batch))

    # -- files ------------------------------------------------------------------------------------------------------
    def _raw(self, indices: Tensor) -> tuple[Batch, Batch]:
        pairs = PairedSamples(self.samples, self.others).select(indices.tolist())
        ((_, batch, paired),) = pairs.batches(Run(len(pairs), progress=False), "preparing")
        return batch, paired

    def _keep(self, folder: Path, limit: int, batch_size: int, processes: Processes, progress: str | None) -> None:
        """Write the files of this process and open the files of all processes; delete them if they are too large."""
        start, stop = processes.part(len(self.samples))
        local = PairedSamples(self.samples, self.others).select(range(start, stop))
        one_process = Run(batch_size, progress=progress is not None)
        stores: dict[str, RowStore] = {}
        count = bytes_ = least = 0
        for _, batch, paired in local.batches(one_process, progress or "preparing"):
            prepared = self.networks.prepare(batch.samples, paired.samples, self.networks.labels_of(batch))
            tensors = _tensors(prepared, self.networks.task.per_token)
            count, bytes_ = count + prepared.count, bytes_ + sum(_bytes(*pair) for pair in tensors.values())
            sample_bytes = sum(values.nbytes // prepared.count for values, mask in tensors.values() if mask is None)
            least = bytes_ + sample_bytes * (len(local) - count)  # a lower bound: the remaining texts may be short
            if least > limit and self.in_step:
                continue
            if least > limit:
                break
            self._like = prepared if self._like is None else self._like
            for name, pair in tensors.items():
                if name not in stores:
                    stores[name] = RowStore(folder / f"{name.replace('/', '-')}-{processes.rank}")
                stores[name].append(*pair)
        if self.in_step:
            rounds = -(-len(local) // batch_size)  # all processes must run sharded networks equally often
            for _ in range(max(processes.gather(rounds)) - rounds):
                self.networks.prepare(batch.samples, paired.samples, self.networks.labels_of(batch))
        all_stores = processes.gather(stores if least <= limit else None)
        self._parts = [stored for stored in all_stores if stored is not None]
        if len(self._parts) == processes.count:
            self._starts = torch.tensor(
                [len(self.samples) * rank // processes.count for rank in range(1, len(all_stores))]
            )
            return
        self._parts = []
        for store in stores.values():
            store.path.unlink()
        warn(
            f"activations of {len(self.samples)} samples need about {bytes_ / count * len(self.samples) / 1e9:.2f} "
            f"GB, more than the limit of {limit * processes.count / 1e9:.2f} GB, and are recomputed for each batch; "
            "raise cache_size to store them"
        )

    def _from_files(self, indices: Tensor) -> PreparedBatch:
        assert self._like is not None
        names = list(_tensors(self._like, self.networks.task.per_token))
        if len(self._parts) == 1:
            stored = {name: self._parts[0][name].read(indices) for name in names}
        else:
            stored = self._from_parts(indices, names)
        activations = {
            name: like.replace(values=stored[name][0], mask=stored[name][1])
            for name, like in self._like.activations.items()
        }
        answers = {name: stored[f"answers/{name}"][0] for name in self._like.answers}
        if self.networks.task.per_token:  # the files are padded with zeros
            is_real = stored["answers/hard"][1]
            answers["hard"] = answers["hard"] if is_real is None else answers["hard"].masked_fill(~is_real, IGNORED)
        return PreparedBatch(activations, answers)

    def _from_parts(self, indices: Tensor, names: Sequence[str]) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Read from the files of several processes and restore the order of the samples."""
        owners = torch.bucketize(indices.contiguous(), self._starts, right=True)
        starts = [0, *self._starts.tolist()]
        order = torch.argsort(owners, stable=True)
        inverse = torch.argsort(order)
        tensors: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name in names:
            chunks = [
                self._parts[rank][name].read(indices[owners == rank] - starts[rank])
                for rank in range(len(self._parts))
                if bool((owners == rank).any())
            ]
            values, masks = concatenate([v for v, _ in chunks]), [mask for _, mask in chunks if mask is not None]
            tensors[name] = (values[inverse], concatenate(masks)[inverse] if masks else None)
        return tensors


def _start(model: StitchedModel) -> str:
    """Return a key of the activations at the source's cut: the network, the cut, and the token mapping."""
    source: Any = model.config.source
    return json.dumps([source["reference"], model.source.cut.layer, source.get("reading")], sort_keys=True)


def _tensors(batch: PreparedBatch, per_token: bool) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return all tensors by name, with a mask for samples of different lengths."""
    tensors = {name: (representation.values, representation.mask) for name, representation in batch.activations.items()}
    mask = next(iter(batch.activations.values())).mask if per_token else None  # of a source: one label for each token
    return tensors | {f"answers/{name}": (values, mask) for name, values in batch.answers.items()}


def _bytes(values: Tensor, mask: Tensor | None) -> int:
    """Return the size of a tensor in a file, which contains only the real positions."""
    return values.nbytes if mask is None else int(mask.sum()) * values[0, 0].nbytes
