"""An adapter of a third library, as a plugin would bring it: scikit-learn's ``MLPClassifier``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.neural_network import MLPClassifier
from torch import nn

from hf_stitch.adapters import Adapter, Interface
from hf_stitch.reference import ModelReference

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "logistic": nn.Sigmoid, "identity": nn.Identity}


class MLP(nn.Sequential):
    """The network of an ``MLPClassifier``, from rows of features to logits.

    Args:
        widths: Of the input, of each hidden layer and of the output.
        activation: By scikit-learn's name.
    """

    def __init__(self, widths: Sequence[int], activation: str) -> None:
        hidden = [
            nn.Sequential(nn.Linear(before, after), ACTIVATIONS[activation]())
            for before, after in zip(widths[:-2], widths[1:-1], strict=True)
        ]
        super().__init__(*hidden, nn.Linear(widths[-2], widths[-1]))
        self.widths, self.activation = list(widths), activation

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Logits of rows ``(n, features)``."""
        return super().forward(features)


class SklearnAdapter(Adapter):
    """Multilayer perceptrons of scikit-learn, cut behind their hidden layers; ``sklearn:file.npz`` is a saved one."""

    library: ClassVar[str] = "sklearn"

    @classmethod
    def serves(cls, model: Any) -> bool:
        """Classifiers that are fitted, and networks that were made of them."""
        return isinstance(model, MLP) or (isinstance(model, MLPClassifier) and hasattr(model, "coefs_"))

    @classmethod
    def load(
        cls,
        reference: ModelReference,
        *,
        example_inputs: Any = None,
        processor: Any = None,
        content: str | None = None,
        **options: Any,
    ) -> Adapter:
        """Read the arrays ``coefs_0``, ``intercepts_0`` … and ``activation`` of a file."""
        assert reference.id is not None
        with np.load(Path(reference.id.removeprefix("sklearn:")), allow_pickle=False) as arrays:
            layers = [(arrays[f"coefs_{i}"], arrays[f"intercepts_{i}"]) for i in range((len(arrays) - 1) // 2)]
            return cls.of(_network(layers, str(arrays["activation"])), reference, example_inputs, processor, content)

    @classmethod
    def of(
        cls,
        model: Any,
        reference: ModelReference,
        example_inputs: Any = None,
        processor: Any = None,
        content: str | None = None,
    ) -> Adapter:
        """Take over the weights of a classifier."""
        if isinstance(model, MLPClassifier):
            model = _network(list(zip(model.coefs_, model.intercepts_, strict=True)), model.activation)
        width = model.widths[0]
        interface = Interface(("features",), "tensor", {"features": (width,)}, {"features": "float32"})
        example = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
        return cls(model, interface, {"features": example if example_inputs is None else example_inputs}, reference)

    @property
    def task(self) -> str | None:
        """It classifies."""
        return "image-classification"

    def blueprint(self) -> dict[str, Any]:
        """Widths and activation."""
        model: Any = self.model
        return {"library": self.library, "widths": model.widths, "activation": model.activation}

    @classmethod
    def build(cls, blueprint: Mapping[str, Any]) -> nn.Module:
        """The network, weights to be loaded."""
        return MLP(blueprint["widths"], blueprint["activation"]).eval()


def _network(layers: Sequence[tuple[Any, Any]], activation: str) -> MLP:
    network = MLP([len(layers[0][0]), *(len(bias) for _, bias in layers)], activation)
    linears = [module for module in network.modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for linear, (weight, bias) in zip(linears, layers, strict=True):
            linear.weight.copy_(torch.as_tensor(weight).T)
            linear.bias.copy_(torch.as_tensor(bias))
    return network.eval()
