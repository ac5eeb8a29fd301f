"""Heads: small networks from vectors to classes, to be trained on what an encoder says."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

Kind = Literal["inductive", "paper"]

ENTRY = "entry"
"""The layer of a head at which it is cut: its input."""


class HeadConfig(PreTrainedConfig):
    """Config of a :class:`Head`.

    Attributes:
        in_features: Width of the vectors: for relative representations, the number of anchors and spaces.
        hidden_size: Width of the hidden layers; ``None``: as the vectors.
        num_hidden_layers: How many there are.
        hidden_act: Their activation, by transformers' name.
        kind: Of the normalisation behind each: ``"inductive"`` over the features of each vector (LayerNorm);
            ``"paper"`` of each feature over the batch (see :class:`Head`).
        num_labels: Number of classes.

    Raises:
        ValueError: If a width is below 1, or there is no such kind or activation.

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

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse what is no network."""
        super().__post_init__(**kwargs)
        for name, least in (("in_features", 1), ("hidden_size", 1), ("num_hidden_layers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act must be one of {', '.join(sorted(ACT2FN))}, got {self.hidden_act!r}")


class Head(PreTrainedModel):
    """Classes from vectors: LayerNorm → [Linear → activation → norm] × n → Linear.

    The head of Moschella et al. (2023), appendix, up to its norm. The default norm looks at each vector by itself
    (LayerNorm). That of the authors' code, ``kind="paper"``, is an InstanceNorm1d over the transposed batch: it
    normalises each feature over the samples that happen to be in the batch, in training and in use. **Its predictions
    depend on the other samples of the test batch** (it is transductive), and of a batch of one sample it tells
    nothing: use it to compare with the paper only.

    It is trained alone on vectors made before (``projection.stream(rows)``), by ``transformers.Trainer`` or any loop,
    or behind an encoder as part of a :class:`~hf_stitch.artefacts.StitchedModel` (:func:`hf_stitch.relative_model`).

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
        """With new weights, as torch draws them."""
        super().__init__(config)
        width = config.hidden_size or config.in_features
        layers: list[nn.Module] = [nn.LayerNorm(config.in_features)]
        widths = [config.in_features, *[width] * config.num_hidden_layers]
        for before in widths[:-1]:
            norm = nn.LayerNorm(width) if config.kind == "inductive" else _BatchwiseNorm()
            layers += [nn.Linear(before, width), ACT2FN[config.hidden_act], norm]
        self.entry = nn.Identity()  # a name for the input, so that the head can be cut there
        self.body = nn.Sequential(*layers)
        self.classifier = nn.Linear(widths[-1], int(config.num_labels or 0))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Two vectors, by which the head can be cut."""
        return {"features": torch.randn(2, self.config.in_features, generator=torch.Generator().manual_seed(0))}

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(self, features: Tensor, labels: Tensor | None = None, **options: Any) -> SequenceClassifierOutput:
        """The logits.

        Args:
            features: Vectors (batch, in_features).
            labels: Classes (batch,).
            **options: ``return_dict=False`` for a tuple.

        Returns:
            ``logits`` (batch, classes) and, with labels, the mean cross-entropy as ``loss``.
        """
        logits = self.classifier(self.body(self.entry(features)))
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class _BatchwiseNorm(nn.Module):
    """InstanceNorm1d of the transposed batch: each feature to mean 0 and variance 1 over the samples."""

    eps: ClassVar[float] = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, 0, correction=0)
        return (x - mean) / (variance + self.eps).sqrt()


AutoConfig.register(HeadConfig.model_type, HeadConfig, exist_ok=True)
AutoModel.register(HeadConfig, Head, exist_ok=True)
AutoModelForSequenceClassification.register(HeadConfig, Head, exist_ok=True)
