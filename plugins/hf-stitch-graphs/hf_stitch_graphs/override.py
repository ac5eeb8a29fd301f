"""Override for graph classifiers: which modules are cuts, a fact that a trace does not reveal."""

from __future__ import annotations

from torch import nn

from hf_stitch.adapters.overrides import Override


class GraphClassifierOverride(Override):
    """Override that allows cuts of a ``GraphClassifier`` after the convolutions only."""

    def blocks(self, model: nn.Module) -> tuple[str, ...]:
        """Return the pooling and the layers after it.

        Args:
            model: The network.
        """
        return tuple(name for name, _ in model.named_children() if name != "logits")
