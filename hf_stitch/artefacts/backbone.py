"""The part of a language model before the layer that predicts tokens, which libraries call by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from hf_stitch.artefacts.hidden_states import seen_in

if TYPE_CHECKING:
    from hf_stitch.artefacts.language import StitchedModelForCausalLM


class Backbone:
    """What ``base_model`` is of any language model: returns hidden states, of which its last layer makes the logits.

    TRL computes its losses from both. A model that scales or caps its logits afterwards is refused, because its logits
    would be others.
    """

    _tp_plan = _pp_plan = None

    def __init__(self, model: StitchedModelForCausalLM) -> None:
        self._of = model

    def __call__(self, *args: Any, **inputs: Any) -> BaseModelOutput:
        """Run the model and return what enters its last layer."""
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        head: Any = self._of.get_output_embeddings()
        hook = head.register_forward_hook(lambda _, given, logits: kept.append((given[0], logits)))
        try:
            output = type(self._of).forward(
                self._of, *args, **inputs | {"return_dict": True}
            )  # TRL replaces that of the object
        finally:
            hook.remove()
        states, logits = kept[-1]
        if not torch.allclose(logits.to(output.logits), output.logits, rtol=0, atol=0, equal_nan=True):
            raise ValueError(
                f"the target, {type(self._of.target.model).__name__}, changes the outputs of its last layer (it scales "
                "or caps them), so that they are not the logits: train it with the Trainer of transformers"
            )
        return BaseModelOutput(last_hidden_state=states, **seen_in(output))
