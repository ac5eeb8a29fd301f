"""An adapter of a third-party library as a plugin: ``MLPClassifier`` of scikit-learn."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.neural_network import MLPClassifier
from torch import nn

from hf_stitch.adapters import Adapter, Described, Interface, Library, Loaded
from hf_stitch.reference import ModelReference

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "logistic": nn.Sigmoid, "identity": nn.Identity}


class MLP(nn.Sequential):
    """The network of an ``MLPClassifier``, from rows of features to logits.

    Args:
        widths: Widths of the input, of each hidden layer and of the output.
        activation: Name of the activation function in scikit-learn.
    """

    def __init__(self, widths: Sequence[int], activation: str) -> None:
        hidden = [
            nn.Sequential(nn.Linear(before, after), ACTIVATIONS[activation]())
            for before, after in itertools.pairwise(widths[:-1])
        ]
        super().__init__(*hidden, nn.Linear(widths[-2], widths[-1]))
        self.widths, self.activation = list(widths), activation

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows.

        Args:
            features: Rows, shape (n, features).
        """
        return super().forward(features)


class Sklearn(Library):
    """Multilayer perceptrons of scikit-learn, with cuts after their hidden layers.

    The name ``sklearn:file.npz`` loads a saved network.
    """

    name: ClassVar[str] = "sklearn"

    def serves(self, model: Any) -> bool:
        """Return whether the model is a fitted classifier or a network created from one."""
        return isinstance(model, MLP) or (isinstance(model, MLPClassifier) and hasattr(model, "coefs_"))

    def load(self, reference: ModelReference, processor: Any = None, **options: Any) -> Loaded:
        """Load a network from the arrays ``coefs_0``, ``intercepts_0`` … and ``activation`` of a file."""
        assert reference.id is not None
        with np.load(Path(reference.id.removeprefix("sklearn:")), allow_pickle=False) as arrays:
            layers = [(arrays[f"coefs_{i}"], arrays[f"intercepts_{i}"]) for i in range((len(arrays) - 1) // 2)]
            return Loaded(_network(layers, str(arrays["activation"])), reference, processor)

    def describe(
        self, model: Any, example_inputs: Any = None, processor: Any = None, content: str | None = None
    ) -> Described:
        """Describe a classifier, with a copy of its weights."""
        if isinstance(model, MLPClassifier):
            model = _network(list(zip(model.coefs_, model.intercepts_, strict=True)), model.activation)
        width = model.widths[0]
        interface = Interface(("features",), "tensor", {"features": (width,)}, {"features": "float32"})
        example = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
        return Described(model, interface, {"features": example if example_inputs is None else example_inputs})

    def task(self, adapter: Adapter) -> str | None:
        """The network classifies."""
        return "image-classification"

    def blueprint(self, model: nn.Module) -> dict[str, Any]:
        """Return the widths and the activation."""
        net: Any = model
        return {"widths": net.widths, "activation": net.activation}

    def build(self, blueprint: Mapping[str, Any]) -> nn.Module:
        """Construct the network without trained weights."""
        return MLP(blueprint["widths"], blueprint["activation"]).eval()


def _network(layers: Sequence[tuple[Any, Any]], activation: str) -> MLP:
    network = MLP([len(layers[0][0]), *(len(bias) for _, bias in layers)], activation)
    linears = [module for module in network.modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for linear, (weight, bias) in zip(linears, layers, strict=True):
            linear.weight.copy_(torch.as_tensor(weight).T)
            linear.bias.copy_(torch.as_tensor(bias))
    return network.eval()
