"""Relative models, with a head on the similarities of encoded samples to anchors: :func:`relative_model`."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters import Adapter, load, load_on
from hf_stitch.analysis.planning import NETWORKS, Plan, bytes_of_weights, seconds_per_sample
from hf_stitch.artefacts.head import ENTRY, Head, HeadConfig, Kind
from hf_stitch.artefacts.joining import join
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Data
from hf_stitch.options import Several, checked
from hf_stitch.provenance import versions
from hf_stitch.relative import AnchorSet, RelativeProjection, Similarity
from hf_stitch.representation import Pooling, RepresentationSpec
from hf_stitch.running import Run
from hf_stitch.stitches import IdentityStitch, Stitch, StitchingLayer
from hf_stitch.workflows._checks import Named, Runs
from hf_stitch.workflows._headed import Anchors, Encoder, as_space

TASKS = {"image": "image-classification", "text": "text-classification"}
"""Modality of the encoder -> task of the head."""

PROJECTION = [
    name for name, option in signature(RelativeProjection).parameters.items() if option.kind == option.KEYWORD_ONLY
]
"""Options of the projection."""


@checked
def relative_model(
    encoder: Runs,
    anchors: Data | AnchorSet,
    similarities: Named | Similarity | Iterable[Named | Similarity] | None = "cosine",
    *,
    layer: str,
    pooling: Pooling = "mean",
    num_labels: Several | None = None,
    kind: Kind = "inductive",
    head: Runs | None = None,
    task: str | None = "auto",
    **options: Any,
) -> StitchedModel:
    """Build a model with a head on the similarities of encoded samples to anchors (Moschella et al. 2023).

    The result is a :class:`~hf_stitch.StitchedModel`: the encoder up to a cut, a stitching layer with a
    :class:`~hf_stitch.relative.RelativeProjection` as its map, and a head. After training of the head,
    :func:`hf_stitch.swap` replaces the encoder without further training.

    Train the head in one of two ways:

    - Train the model as returned. The encoder is frozen and stays in eval mode; for end-to-end training, call
      ``model.source.requires_grad_(True)``. Such a model is saved whole.
    - Train only the head on precomputed relative representations, which is much faster, and pass it as ``head``. Such a
      model can also be shared as a :class:`~hf_stitch.Stitcher`, which refers to both networks by name.

    Args:
        encoder: The encoder: an adapter, a module, or a name for :func:`hf_stitch.load`.
        anchors: The anchors: raw samples (for example from :func:`hf_stitch.relative.select_anchors`), or an
            :class:`~hf_stitch.relative.AnchorSet` with their encoding by this encoder at this layer. The model stores
            and saves them.
        similarities: The similarity function or functions, as for
            :class:`~hf_stitch.relative.RelativeProjection`. ``None`` builds the *absolute* model for comparison, with
            the identity instead of the projection.
        layer: The cut of the encoder.
        pooling: Which vector represents a sample: ``mean``, ``cls``, ``last`` or ``flatten``.
        num_labels: Number of classes of a new head. Required if ``head`` is not given.
        kind: Normalisation of a new head, ``inductive`` or ``paper`` (see :class:`~hf_stitch.artefacts.Head`).
        head: An existing head instead of a new one: a :class:`~hf_stitch.artefacts.Head`, a name or folder for
            :func:`hf_stitch.load`, or any module that accepts the (n, features) vectors, for example the decoder of an
            autoencoder. Train a module of your own code first; a model with such a head can only be shared as a
            :class:`~hf_stitch.Stitcher`.
        task: Task of the model: ``image-classification``, ``text-classification``, or ``None`` for the plain output of
            the head. ``"auto"`` derives it from the encoder's modality if the head is a
            :class:`~hf_stitch.artefacts.Head`, and is ``None`` otherwise.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``, ``progress``; and
            options of the projection (``center=True``, ``normalise="l2"``, …).

    Returns:
        The stitched model, in eval mode. Its ``anchors`` attribute is the anchor set.

    Raises:
        NotACutError: If the encoder cannot be cut at the layer.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, Sequential, Tanh
        >>> encoder = hf_stitch.load(Sequential(Linear(4, 8), Tanh()), example_inputs=torch.randn(2, 4))
        >>> model = hf_stitch.relative_model(encoder, torch.randn(30, 4), layer="1", num_labels=3)
        >>> model(input=torch.randn(5, 4)).logits.shape
        torch.Size([5, 3])
    """
    with Run.of(relative_model, options, ("batch_size", "progress", *PROJECTION)) as run:
        source, passed = load_on(encoder, run.processes.device), Anchors.of(anchors)
        encoding = Encoder(source, layer, pooling, run)
        if run.planning:
            return _planned(encoding, passed)
        anchor_set = encoding.add(passed.set, passed.samples)
        vectors = anchor_set.values(source, layer, pooling)
        body: Stitch
        if similarities is None:
            if options:
                raise TypeError(
                    f"options of the projection require similarities, got {', '.join(sorted(options))}; remove them"
                )
            body = IdentityStitch(vectors.shape[1], vectors.shape[1])
        else:
            body = RelativeProjection.of(vectors, similarities, ids=anchor_set.ids, **options)
        width = body.out_features
        target, entry = _target(head, width, num_labels, kind)
        if similarities is not None and isinstance(target.model, Head):
            _bind_anchors(target.model, anchor_set)
        if task == "auto":
            task = TASKS.get(source.interface.modality) if isinstance(target.model, Head) else None
        with torch.no_grad():
            means = {"body": body(vectors).mean(0)}
        layer_stitch = StitchingLayer(source.spec(layer), RepresentationSpec("bd", width), pooling, body, means=means)
        recipe = {"anchors": anchor_set.fingerprint, "pooling": pooling, "samples": len(anchor_set)}
        recipe["versions"] = versions()
        recipe["space"] = as_space(source.pinned, layer, pooling)
        model = join(source, layer, layer_stitch.to(source.device), target, entry, task=task, recipe=recipe)
        model.parents = None  # training changes the model's copy of the head, not the passed head
        model.anchors = anchor_set
        model.target.to(source.device)  # a new head is still on the CPU
        model.source.requires_grad_(False)
        return model


def _planned(encoder: Encoder, anchors: Anchors) -> Any:
    run, device, count = encoder.run, encoder.network.device, len(anchors.set)
    seconds = 0.0 if anchors.samples is None else count * seconds_per_sample(encoder.read, anchors.samples, run, device)
    memory = {NETWORKS: bytes_of_weights(encoder.network.model)}
    return Plan.of(f"relative_model, {count} anchors", {"encoding anchors": seconds}, memory, {}, device, run)


def _bind_anchors(head: Head, anchors: AnchorSet) -> None:
    """Check that a head belongs to the anchors, or assign the anchors to a new head."""
    config: Any = head.config
    if config.anchors_fingerprint not in (None, anchors.fingerprint):
        raise ValueError(
            f"the head was trained on similarities to other anchors ({config.anchors_fingerprint}, not "
            f"{anchors.fingerprint}) and would predict at chance; pass its anchors, or, if these correspond to them "
            "(translations), first set head.config.anchors_fingerprint = None"
        )
    config.anchors_fingerprint = anchors.fingerprint


def _target(
    head: str | nn.Module | Adapter | None, width: int, num_labels: int | None, kind: Kind
) -> tuple[Adapter, str]:
    """Return the head as a network with a cut at its input, and the name of this cut."""
    if (head is None) == (num_labels is None):
        raise ValueError("pass exactly one of head and num_labels (the number of classes of a new head)")
    if head is None:
        config: Any = HeadConfig
        head = Head(config(in_features=width, num_labels=num_labels, kind=kind))
    adapter = load(head) if isinstance(head, str | Head | Adapter) else None
    if adapter is not None and isinstance(adapter.model, Head):
        expected = adapter.model.config.in_features
        if expected != width:
            raise ValueError(
                f"the head expects {expected} features, got {width} (number of similarities to the anchors, or width "
                f"of the encoder for an absolute model); use a head with in_features={width}"
            )
        return adapter, ENTRY
    module: Any = head if adapter is None else adapter.model
    with_entry = nn.Sequential(nn.Identity(), module)
    parameter = next(module.parameters(), torch.zeros(()))
    example = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    return load(with_entry, example_inputs=example.to(parameter)), "0"
