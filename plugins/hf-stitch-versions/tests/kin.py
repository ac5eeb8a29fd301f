"""Networks derived from a network in ways that are known: rounded, pruned, noisy, reordered, rotated.

A network is a mapping from names of parameters to weights with outputs first. ``AXES`` names the axes of the parameters
of a family, as regular expressions; axes of one name have their units in one order. ``h{}`` is numbered by the block.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests import tiny_networks  # isort: skip

Weights = dict[str, Tensor]

ANY = None
"""An axis whose units have a fixed order."""

AXES: dict[str, list[tuple[str, tuple[str | None, ...]]]] = {
    "llama": [
        (r"(q|k|v)_proj\.weight", ("a{}", "d")), (r"(q|k|v)_proj\.bias", ("a{}",)), (r"o_proj\.weight", ("d", "a{}")),
        (r"(gate|up)_proj\.weight", ("h{}", "d")), (r"down_proj\.weight", ("d", "h{}")),
        (r"norm\.weight", ("d",)), (r"(embed_tokens|lm_head)\.weight", (ANY, "d")),
    ],
    "gpt2": [
        (r"w[tp]e\.weight", (ANY, "d")), (r"ln_.\.(weight|bias)", ("d",)),
        (r"c_attn\.weight", (ANY, "d")), (r"c_attn\.bias", (ANY,)),
        (r"attn\.c_proj\.weight", ("d", ANY)), (r"c_proj\.bias", ("d",)),
        (r"c_fc\.weight", ("h{}", "d")), (r"c_fc\.bias", ("h{}",)), (r"mlp\.c_proj\.weight", ("d", "h{}")),
    ],
    "bert": [
        (r"\w+_embeddings\.weight", (ANY, "d")), (r"LayerNorm\.(weight|bias)", ("d",)),
        (r"(query|key|value)\.weight", ("a{}", "d")), (r"(query|key|value)\.bias", ("a{}",)),
        (r"attention\.output\.dense\.weight", ("d", "a{}")), (r"output\.dense\.bias", ("d",)),
        (r"intermediate\.dense\.weight", ("h{}", "d")), (r"intermediate\.dense\.bias", ("h{}",)),
        (r"\d\.output\.dense\.weight", ("d", "h{}")),
        (r"transform\.dense\.weight", ("d", "d")), (r"transform\.dense\.bias", ("d",)),
        (r"pooler\.dense\.weight", (ANY, "d")),
    ],
    "vit": [
        (r"(cls_token|position_embeddings)$", (ANY, ANY, "d")), (r"projection\.weight", ("d", ANY)),
        (r"projection\.bias", ("d",)), (r"layernorm(_\w+)?\.(weight|bias)", ("d",)),
        (r"(q|k|v)_proj\.weight", ("a{}", "d")), (r"(q|k|v)_proj\.bias", ("a{}",)), (r"o_proj\.weight", ("d", "a{}")),
        (r"(o_proj|fc2)\.bias", ("d",)), (r"fc1\.weight", ("h{}", "d")), (r"fc1\.bias", ("h{}",)),
        (r"fc2\.weight", ("d", "h{}")), (r"classifier\.weight", (ANY, "d")),
    ],
    "resnet20": [
        (r"^conv1\.weight", ("s1", ANY)), (r"^bn1\.", ("s1",)), (r"fc\.weight", (ANY, "s3")), (r"\.bn1\.", ("h{}",)),
        *((rf"layer{k}\.0\.conv1\.weight", ("h{}", f"s{k - 1}")) for k in (2, 3)),
        *((rf"layer{k}\..\.downsample\.0\.weight", (f"s{k}", f"s{k - 1}")) for k in (2, 3)),
        *((rf"layer{k}\..\.conv1\.weight", ("h{}", f"s{k}")) for k in (1, 2, 3)),
        *((rf"layer{k}\..\.conv2\.weight", (f"s{k}", "h{}")) for k in (1, 2, 3)),
        *((rf"layer{k}\..\.(bn2|downsample\.1)\.", (f"s{k}",)) for k in (1, 2, 3)),
    ],
    "mlp": [
        (r"^1\.weight", ("c1", ANY)), *((rf"^{k}\.weight", (f"c{k}", f"c{k - 2}")) for k in (3, 5)),
        *((rf"^{k}\.bias", (f"c{k}",)) for k in (1, 3, 5)), (r"^7\.weight", (ANY, "c5")),
    ],
    "vgg": [
        (r"^0\.weight", ("c0", ANY)), *((rf"^{k}\.weight", (f"c{k}", f"c{k - 3}")) for k in (3, 6, 9, 12)),
        *((rf"^{k + i}\.", (f"c{k}",)) for k in (0, 3, 6, 9, 12) for i in (0, 1)), (r"^17\.weight", (ANY, "c12")),
    ],
}  # fmt: skip

CONVOLUTIONAL = {"mlp", "vgg", "resnet20"}
"""Families that are built here."""

CHAINS = {"mlp", "vgg"}
"""Families without a residual stream: all units are hidden."""

HEADS = {"llama": 4, "bert": 4, "vit": 4}
"""Families whose heads can be reordered, and how many there are."""

BLOCKS = re.compile(r"(.*\b(?:blocks?|layers?|layer\d|h)\.\d+)\.")
"""Prefix of what is in a block."""


class ResidualBlock(nn.Module):
    """The block of ResNet-20."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.conv1, self.bn1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        down = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.downsample = nn.Identity() if before == width else down

    def forward(self, x: Tensor) -> Tensor:
        inside = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inside + self.downsample(x))


def convolutional(family: str) -> nn.Sequential:
    """Build a small network: "mlp", "vgg" or "resnet20"."""
    layers: list[nn.Module] = []
    if family == "mlp":
        sizes = (48, 64, 64, 64)
        for one, two in pairwise(sizes):
            layers += [nn.Linear(one, two), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 5))
    if family == "vgg":
        for one, two in pairwise((3, 24, 24, 48, 48, 48)):
            layers += [nn.Conv2d(one, two, 3, 1 if one == two else 2, 1), nn.BatchNorm2d(two), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 5))
    stages = {"layer1": (16, 16), "layer2": (16, 32), "layer3": (32, 64)}
    made = {"conv1": nn.Conv2d(3, 16, 3, 1, 1, bias=False), "bn1": nn.BatchNorm2d(16), "relu": nn.ReLU()}
    made |= {
        name: nn.Sequential(ResidualBlock(*widths), ResidualBlock(widths[1], widths[1]))
        for name, widths in stages.items()
    }
    made |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(64, 5)}
    return nn.Sequential(OrderedDict(made))


def build(family: str, seed: int) -> nn.Module:
    """Build a small network with scales and biases as if it were trained, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = convolutional(family) if family in CONVOLUTIONAL else tiny_networks.build(family, seed)
        with torch.no_grad():
            for name, x in kept(model).items():
                if x.dim() == 1:
                    x += 0.2 * torch.rand_like(x)
                elif family not in CONVOLUTIONAL:
                    x *= 3 if "bias" not in name else 1
    return model.eval()


def kept(network: nn.Module) -> Weights:
    """Return parameters and floating buffers, in the order of the modules."""
    both = (*network.named_parameters(), *network.named_buffers())
    return {name: x for name, x in both if x.is_floating_point() and "inv_freq" not in name}


def read(network: nn.Module) -> Weights:
    """Return the weights of a network with outputs first."""
    sideways = {id(module.weight) for module in network.modules() if isinstance(module, Conv1D)}
    return {name: (x.T if id(x) in sideways else x).detach().clone() for name, x in kept(network).items()}


def write(network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Put weights into a network."""
    sideways = {id(module.weight) for module in network.modules() if isinstance(module, Conv1D)}
    with torch.no_grad():
        for name, x in kept(network).items():
            x.copy_(weights[name].T if id(x) in sideways else weights[name])
    return network


def blocks(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of blocks."""
    return list(dict.fromkeys(found[1] for name in weights if (found := BLOCKS.match(name))))


def axes(family: str, name: str) -> tuple[str | None, ...]:
    """Return the names of the axes of a parameter."""
    number = re.search(r"\d+\.\d|\d+", name)
    found = next((names for pattern, names in AXES[family] if re.search(pattern, name)), ())
    return tuple(each and each.format(number[0] if number else "") for each in found)


def turned(weights: Weights, family: str, kinds: str, make: Callable[[int], Tensor]) -> Weights:
    """Turn the units of all axes whose name begins with one of the letters, by a matrix of that size each."""
    matrices: dict[str, Tensor] = {}
    done = {}
    for name, x in weights.items():
        for i, axis in enumerate(axes(family, name)):
            if axis is not ANY and axis[0] in kinds:
                matrix = matrices.setdefault(axis, make(x.shape[i]))
                x = torch.tensordot(matrix.to(x), x, dims=([1], [i])).movedim(0, i)
        done[name] = x
    return done


def permutation(g: torch.Generator) -> Callable[[int], Tensor]:
    """Make random orders."""
    return lambda n: torch.eye(n)[torch.randperm(n, generator=g)]


def rotation(g: torch.Generator) -> Callable[[int], Tensor]:
    """Make random rotations."""
    return lambda n: torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))[0]


def heads(g: torch.Generator, number: int) -> Callable[[int], Tensor]:
    """Make random orders of heads."""
    return lambda n: torch.kron(permutation(g)(number), torch.eye(n // number))


def rotated(weights: Weights, family: str, g: torch.Generator) -> Weights:
    """Rotate the residual stream of a Llama, whose norms get no scale: the weights that read them take it over."""
    done = dict(weights)
    done.setdefault("lm_head.weight", done["model.embed_tokens.weight"])
    norms = {name for name in weights if name.endswith("norm.weight")}
    for norm in norms:
        block, _, kind = norm.removesuffix(".weight").rpartition(".")
        readers = {
            "input_layernorm": rf"{block}\..*(q|k|v)_proj",
            "post_attention_layernorm": rf"{block}\..*(gate|up)_proj",
        }
        for name in [name for name in done if re.match(rf"({readers.get(kind, 'lm_head')})\.weight", name)]:
            done[name] = done[name] * done[norm]
    return turned(done, family, "d", rotation(g)) | {norm: torch.ones_like(done[norm]) for norm in norms}


def rounded(weights: Weights, bits: int) -> Weights:
    """Round the rows of matrices to so many bits."""

    def one(x: Tensor) -> Tensor:
        if x.dim() < 2:
            return x
        step = x.flatten(1).abs().amax(1).clamp_min(1e-12).reshape(-1, *[1] * (x.dim() - 1)) / (2 ** (bits - 1) - 1)
        return (x / step).round() * step

    return {name: one(x) for name, x in weights.items()}


def pruned(weights: Weights, share: float) -> Weights:
    """Set the smallest weights of matrices to zero."""
    return {
        name: x if x.dim() < 2 else torch.where(x.abs() < x.abs().flatten().kthvalue(int(share * x.numel()))[0], 0, x)
        for name, x in weights.items()
    }  # fmt: skip


def noisy(weights: Weights, share: float, g: torch.Generator) -> Weights:
    """Add noise of a share of the norm of each matrix."""
    return {
        name: x if x.dim() < 2 else x + share * x.square().mean().sqrt() * torch.randn(x.shape, generator=g)
        for name, x in weights.items()
    }  # fmt: skip


def mixed(parents: Sequence[Weights], fractions: Sequence[float]) -> Weights:
    """Average weights."""
    return {name: sum(f * each[name] for f, each in zip(fractions, parents, strict=True)) for name in parents[0]}  # type: ignore[misc]
