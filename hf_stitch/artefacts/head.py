"""Heads: small classifiers of vectors, trained on the activations of an encoder."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

from hf_stitch.options import check
from hf_stitch.tasks.heads import task_named

Kind = Literal["inductive", "paper"]

ENTRY = "entry"
"""The layer for cutting a head: its input."""


class HeadConfig(PreTrainedConfig):
    """Config of a :class:`Head`.

    Attributes:
        in_features: Width of the input vectors; for relative representations the number of anchors, times the number of
            similarities if they are concatenated.
        hidden_size: Width of the hidden layers; ``None``: the same as ``in_features``.
        num_hidden_layers: Number of hidden layers.
        hidden_act: Name of the activation function in transformers.
        kind: Normalisation after each hidden layer: ``"inductive"`` over the features of each vector (LayerNorm), or
            ``"paper"`` over the batch for each feature (see :class:`Head`).
        num_labels: Number of classes.
        anchors_fingerprint: ``AnchorSet.fingerprint`` of the anchors, if the inputs are similarities to known anchors;
            otherwise ``None``.

    Example:
        >>> HeadConfig(in_features=300, num_labels=6).num_hidden_layers
        2
    """

    model_type = "hf_stitch_head"

    in_features: int = 1
    hidden_size: int | None = None
    num_hidden_layers: int = 2
    hidden_act: str = "silu"
    kind: Kind = "inductive"
    anchors_fingerprint: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the values."""
        super().__post_init__(**kwargs)
        for name, minimum in (("in_features", 1), ("hidden_size", 1), ("num_hidden_layers", 0)):
            number = getattr(self, name)
            if number is not None and number < minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {number}")
        check(Kind, kind=self.kind)
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act must be one of {', '.join(sorted(ACT2FN))}, got {self.hidden_act!r}")


class Head(PreTrainedModel):
    """Classification head on vectors: LayerNorm → [Linear → activation → norm] × n → Linear.

    This is the head of Moschella et al. (2023), appendix, except for its norm. The default norm (LayerNorm) treats each
    vector separately. ``kind="paper"`` uses the norm of the authors' code, an InstanceNorm1d over the transposed batch:
    it normalises each feature over the samples of the batch, in training and in evaluation. **Its predictions depend on
    all samples of the test batch** (it is transductive) and are meaningless for a batch of one sample. Use it only for
    comparisons with the paper.

    Train the head on precomputed vectors (``projection.stream(rows)``), with ``transformers.Trainer`` or any training
    loop, or as part of a :class:`~hf_stitch.artefacts.StitchedModel` with an encoder
    (:func:`hf_stitch.relative_model`).

    Args:
        config: The config. Weights are initialised with the defaults of torch.

    Example:
        >>> head = Head(HeadConfig(in_features=300, num_labels=6))
        >>> head(features=torch.randn(4, 300), labels=torch.tensor([0, 5, 1, 1])).logits.shape
        torch.Size([4, 6])
    """

    config_class = HeadConfig
    main_input_name = "features"
    accepts_loss_kwargs = False

    config: HeadConfig

    def __init__(self, config: HeadConfig) -> None:
        """Build the layers with the default initialisation of torch."""
        super().__init__(config)
        width = config.hidden_size or config.in_features
        layers: list[nn.Module] = [nn.LayerNorm(config.in_features)]
        widths = [config.in_features, *[width] * config.num_hidden_layers]
        for in_width in widths[:-1]:
            norm = nn.LayerNorm(width) if config.kind == "inductive" else _BatchwiseNorm()
            layers += [nn.Linear(in_width, width), ACT2FN[config.hidden_act], norm]
        self.entry = nn.Identity()  # names the input, so that the head can be cut there
        self.body = nn.Sequential(*layers)
        self.classifier = nn.Linear(widths[-1], int(config.num_labels or 0))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Two random vectors: example inputs for cutting the head."""
        return {"features": torch.randn(2, self.config.in_features, generator=torch.Generator().manual_seed(0))}

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(self, features: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Compute the logits. As in transformers, ``return_dict=False`` returns a tuple.

        Args:
            features: Vectors (batch, in_features).
            labels: Classes (batch,) int64. Default: no loss.

        Returns:
            ``logits`` (batch, classes) and, with labels, the mean cross-entropy as ``loss``.
        """
        logits = self.classifier(self.body(self.entry(features)))
        task = task_named("regression" if self.config.num_labels == 1 else "text-classification")
        return SequenceClassifierOutput(loss=None if labels is None else task.loss(logits, labels), logits=logits)


class _BatchwiseNorm(nn.Module):
    """InstanceNorm1d of the transposed batch: normalises each feature over the samples."""

    eps: ClassVar[float] = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, 0, correction=0)
        return (x - mean) / (variance + self.eps).sqrt()


AutoConfig.register(HeadConfig.model_type, HeadConfig, exist_ok=True)
AutoModel.register(HeadConfig, Head, exist_ok=True)
AutoModelForSequenceClassification.register(HeadConfig, Head, exist_ok=True)
