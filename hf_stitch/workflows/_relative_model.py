"""Relative models: a head that looks at an encoder through its similarities to anchors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters import Adapter, load
from hf_stitch.artefacts.head import ENTRY, Head, HeadConfig, Kind
from hf_stitch.artefacts.joining import join
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Samples
from hf_stitch.provenance import versions
from hf_stitch.relative import AnchorSet, RelativeProjection, Similarity
from hf_stitch.representation import Pooling, RepresentationSpec
from hf_stitch.stitches import IdentityStitch, Stitch, StitchingLayer
from hf_stitch.workflows._swap import as_space

TASKS = {"image": "image-classification", "text": "text-classification"}
"""What a head does, by the samples of the encoder."""


def relative_model(
    encoder: str | nn.Module | Adapter,
    anchors: Any,
    similarities: str | Similarity | Mapping[str, Any] | Sequence[Any] | None = "cosine",
    *,
    layer: str,
    pooling: Pooling = "mean",
    num_labels: int | None = None,
    kind: Kind = "inductive",
    head: str | nn.Module | Adapter | None = None,
    task: str | None = "auto",
    batch_size: int = 64,
    progress: bool = True,
    **options: Any,
) -> StitchedModel:
    """A head on a frozen encoder, by way of the encoder's similarities to anchors (Moschella et al. 2023).

    An ordinary :class:`~hf_stitch.StitchedModel`: the encoder up to a cut, a stitching layer whose map is a
    :class:`~hf_stitch.relative.RelativeProjection`, and a head cut at its input. Once the head is trained,
    :func:`hf_stitch.swap` gives it another encoder with no training.

    Train it as it is (the encoder takes no gradient and stays in eval mode; for end-to-end training,
    ``model.source.requires_grad_(True)``), or, much faster, the head alone on vectors made before, and build this with
    the trained ``head``. Only what was built of trained networks can be shared as a :class:`~hf_stitch.Stitcher`, which
    names them; what was trained as it is, is saved whole.

    Args:
        encoder: An adapter, a live module, or a name for :func:`hf_stitch.load`.
        layer: Its cut.
        anchors: The samples (:func:`hf_stitch.relative.select_anchors` chooses some), or a set that is encoded by this
            encoder at this layer. They are kept with the model.
        similarities: As of the projection. ``None``: the *absolute* model, for comparison, with the identity in place
            of the projection.
        pooling: Which vector stands for a sample: ``mean``, ``cls``, ``last`` or ``flatten``.
        num_labels: Number of classes of a new head.
        kind: Of a new head.
        head: A :class:`~hf_stitch.artefacts.Head`, trained or not, or where one was saved; or any module that takes the
            vectors, ``(n, anchors)``, such as the decoder of an autoencoder (being of user code, it is trained first,
            and a model with it shared as a :class:`~hf_stitch.Stitcher`).
        task: Which head the model has: ``image-classification``, ``text-classification`` or ``None`` (the head's own
            output). ``"auto"``: for a :class:`~hf_stitch.artefacts.Head` by the encoder's samples, else ``None``.
        batch_size: Anchors per forward.
        progress: Show a progress bar.
        **options: Of the projection (``center=True``, ``normalise="l2"``, …).

    Returns:
        The model, in eval mode; ``anchors`` holds the set.

    Raises:
        NotACutError: If the layer is no cut.
        ValueError: If the anchors cannot be used (:meth:`~hf_stitch.relative.AnchorSet.encode`), the set is not encoded
            so, the head takes vectors of another width, or there is no head.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, Sequential, Tanh
        >>> encoder = hf_stitch.load(Sequential(Linear(4, 8), Tanh()), example_inputs=torch.randn(2, 4))
        >>> model = hf_stitch.relative_model(encoder, torch.randn(30, 4), layer="1", num_labels=3)
        >>> model(input=torch.randn(5, 4)).logits.shape
        torch.Size([5, 3])
    """
    source = load(encoder)
    known = anchors if isinstance(anchors, AnchorSet) else None
    if known is None:
        samples = Samples.of(anchors)
        known = AnchorSet.of(samples).encode(source, layer, samples, pooling, batch_size=batch_size, progress=progress)
    vectors = known.values(source, layer, pooling)
    body: Stitch
    if similarities is None:
        if options:
            raise TypeError(f"the absolute model has no projection, got its options {', '.join(sorted(options))}")
        body = IdentityStitch(vectors.shape[1], vectors.shape[1])
    else:
        body = RelativeProjection.of(vectors, similarities, **options)
    width = body.out_features
    target, entry = _target(head, width, num_labels, kind)
    if task == "auto":
        task = TASKS.get(source.interface.modality) if isinstance(target.model, Head) else None
    with torch.no_grad():
        means = {"body": body(vectors).mean(0)}
    joint = StitchingLayer(source.spec(layer), RepresentationSpec("bd", width), pooling, body, means=means)
    recipe = {"anchors": known.fingerprint, "pooling": pooling, "samples": len(known), "versions": versions()}
    if similarities is None:
        recipe["space"] = as_space(source.pinned, layer, pooling)
    model = join(source, layer, joint, target, entry, task=task, recipe=recipe)
    model.parents = None  # the head that is trained is this model's own, and the one given would be taken for it
    model.anchors = known
    model.source.requires_grad_(False)
    return model


def _target(
    head: str | nn.Module | Adapter | None, width: int, num_labels: int | None, kind: Kind
) -> tuple[Adapter, str]:
    """The head as a network that can be cut at its input, and the name of the cut."""
    if (head is None) == (num_labels is None):
        raise ValueError("give either a head, or num_labels for a new one")
    if head is None:
        config: Any = HeadConfig
        head = Head(config(in_features=width, num_labels=num_labels, kind=kind))
    adapter = load(head) if isinstance(head, str | Head | Adapter) else None
    if adapter is not None and isinstance(adapter.model, Head):
        takes = adapter.model.config.in_features
        if takes != width:
            raise ValueError(
                f"the head takes vectors of {takes} features, and the encoder gives {width} (similarities to anchors, "
                "or its own width where it is absolute)"
            )
        return adapter, ENTRY
    module: Any = head if adapter is None else adapter.model
    entered = nn.Sequential(nn.Identity(), module)
    parameter = next(module.parameters(), torch.zeros(()))
    example = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    return load(entered, example_inputs=example.to(parameter)), "0"
