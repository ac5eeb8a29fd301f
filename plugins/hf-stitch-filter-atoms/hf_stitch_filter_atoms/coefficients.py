"""Coefficients that several networks share, and training of atoms only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from hf_stitch_filter_atoms.atomizing import Truncation, atomized, relative_error
from hf_stitch_filter_atoms.convolution import AtomConv2d


def share_coefficients(models: Sequence[nn.Module], reference: nn.Module | None = None) -> list[Truncation]:
    """Give the same coefficients to several atomized networks, in place.

    With a reference, all networks get its coefficients, and the atoms with which these approximate their weights best
    (least squares). Without one, coefficients are chosen such that the total squared error of the weights of all
    networks is least: they are singular vectors of all weights side by side, and orthonormal.

    Shared coefficients approximate networks that were trained independently badly: see what is returned. Networks
    trained from a common one with :func:`train_atoms_only` share their coefficients already.

    Args:
        models: Atomized networks of one architecture, with equal numbers of atoms.
        reference: An atomized network of the same architecture. It is not modified, unless it is one of the models.

    Returns:
        For each network, the relative error of the weight of each layer. This is what sharing costs.

    Raises:
        ValueError: If there is no model, one is not atomized, or their convolutions differ. No network is then
            modified.

    Example:
        >>> from hf_stitch_filter_atoms import atomize
        >>> nets = [nn.Sequential(nn.Conv2d(2, 4, 3)) for _ in range(2)]
        >>> for net in nets:
        ...     _ = atomize(net)
        >>> costs = share_coefficients(nets)
        >>> torch.equal(nets[0][0].coefficients, nets[1][0].coefficients)
        True
    """
    if not models:
        raise ValueError("there is no model to share coefficients with")
    layers = [atomized(model) for model in models]
    check_same_layers([*layers, *([atomized(reference)] if reference is not None else [])])
    shared = {
        name: (
            _common([_filters(each[name]) for each in layers], layers[0][name])
            if reference is None
            else atomized(reference)[name].coefficients.detach().clone()
        )
        for name in layers[0]
    }
    before = [{name: _filters(conv) for name, conv in each.items()} for each in layers]  # a network may be named twice
    return [
        Truncation({name: _impose(conv, shared[name], weights[name]) for name, conv in each.items()})
        for each, weights in zip(layers, before, strict=True)
    ]


def train_atoms_only(model: nn.Module, also: Iterable[str] = ()) -> list[nn.Parameter]:
    """Let only the atoms of a network learn, and the modules that are named.

    Running statistics of batch normalization are no parameters: they change in training mode, unless those modules are
    set to evaluation mode.

    Args:
        model: An atomized network.
        also: Names of modules whose parameters learn too, for example the classifier.

    Returns:
        The parameters that learn, for an optimizer. All others get ``requires_grad=False``.

    Raises:
        ValueError: If the network is not atomized, or a module is unknown or has no parameters. Nothing is then
            modified.

    Example:
        >>> from hf_stitch_filter_atoms import atomize
        >>> net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 2))
        >>> _ = atomize(net)
        >>> [tuple(p.shape) for p in train_atoms_only(net, also=["2"])]
        [(9, 3, 3), (2, 4), (2,)]
    """
    if isinstance(also, str):
        raise ValueError(f"also must be names of modules in a list, got the string {also!r}")
    chosen = {id(conv.atoms) for conv in atomized(model).values()}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in also:
        if name not in modules:
            raise ValueError(f"there is no module {name!r}; modules: {', '.join(repr(n) for n in modules if n)}")
        own = [id(parameter) for parameter in modules[name].parameters()]
        if not own:
            raise ValueError(f"module {name!r} has no parameters")
        chosen.update(own)
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def check_same_layers(layers: Sequence[dict[str, AtomConv2d]]) -> None:
    """Raise a ``ValueError`` unless the convolutions of all networks have the same names and shapes.

    Args:
        layers: For each network, name -> convolution with atoms.
    """
    first = layers[0]
    for other in layers[1:]:
        if first.keys() != other.keys():
            odd = sorted(first.keys() ^ other.keys())[0]
            raise ValueError(f"the networks differ: only one has atoms at layer {odd!r}")
        for name, conv in first.items():
            ours, theirs = ((*c.coefficients.shape, *c.kernel_size) for c in (conv, other[name]))
            if ours != theirs:
                raise ValueError(f"layer {name!r} has (out, in / groups, atoms, kernel) {ours} and {theirs}")


def _filters(conv: AtomConv2d) -> Tensor:
    """Spatial filters of a convolution in float64 on the CPU, ``(out·in / groups, kh·kw)``."""
    return conv.coefficients.detach().cpu().double().flatten(0, 1) @ conv.atoms.detach().cpu().double().flatten(1)


def _common(filters: Sequence[Tensor], like: AtomConv2d) -> Tensor:
    """The orthonormal coefficients that approximate all filters best: columns side by side, from their Gram matrix."""
    beside = torch.cat(list(filters), 1)
    count = like.coefficients.shape[2]
    directions = torch.linalg.eigh(beside.T @ beside).eigenvectors.flip(1)[:, :count]
    columns = torch.linalg.qr(beside @ directions).Q
    columns = nn.functional.pad(columns, (0, count - columns.shape[1]))  # fewer filters than atoms
    return columns.view(like.coefficients.shape).to(like.coefficients)


def _impose(conv: AtomConv2d, coefficients: Tensor, weight: Tensor) -> float:
    """Exchange the coefficients, fit the atoms to the filters, and return the relative error of the weight."""
    given = coefficients.to(conv.coefficients)
    atoms = torch.linalg.pinv(given.cpu().double().flatten(0, 1)) @ weight
    with torch.no_grad():
        conv.coefficients.copy_(given)
        conv.atoms.copy_(atoms.view_as(conv.atoms))
    return relative_error(weight.view(*conv.coefficients.shape[:2], *conv.kernel_size), conv)
