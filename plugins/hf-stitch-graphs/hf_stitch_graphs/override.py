"""What a trace does not reveal of networks of graphs."""

from __future__ import annotations

from torch import nn

from hf_stitch.adapters.overrides import Override


class GraphClassifierOverride(Override):
    """The layers of a ``GraphClassifier`` at which it can be cut are those behind the convolutions."""

    def blocks(self, model: nn.Module) -> tuple[str, ...]:
        """Return the pooled vectors and the layers behind them.

        Args:
            model: The network.
        """
        return tuple(name for name, _ in model.named_children() if name != "logits")
