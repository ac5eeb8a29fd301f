"""CPM-Ant, which takes the id 0 for padding, whatever its config defines."""

from __future__ import annotations

from torch import nn

from hf_stitch.adapters.overrides.base import Override

PADDING = 0


class OfTexts(Override):
    """Override for all networks of the family."""

    def special_ids(self, model: nn.Module) -> tuple[int, ...]:
        """Return the id of padding, which the embeddings and the attention mask look for."""
        return (PADDING,)
