"""Shared coefficients of several networks, and training of atoms only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from hf_stitch_filter_atoms.atomizing import Truncation, atomized, relative_error
from hf_stitch_filter_atoms.convolution import AtomConv2d


def share_coefficients(models: Sequence[nn.Module], reference: nn.Module | None = None) -> list[Truncation]:
    """Make several atomized networks share the same coefficients, in place.

    With a reference, all networks receive its coefficients, and atoms that approximate their weights best (least
    squares). Without a reference, the coefficients minimise the total squared error of the weights of all networks:
    orthonormal singular vectors of all concatenated weights.

    Shared coefficients are a poor approximation of independently trained networks: check the returned errors. Networks
    trained from a common start with :func:`train_atoms_only` already share their coefficients.

    Args:
        models: Atomized networks of one architecture, with equal numbers of atoms.
        reference: An atomized network of the same architecture. It is modified only if it is one of the models.

    Returns:
        For each network, the relative error of the weight of each layer due to sharing.

    Raises:
        ValueError: If ``models`` is empty, a network is not atomized, or their convolutions differ. The networks are
            then not modified.

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
        raise ValueError("models must not be empty")
    layers = [atomized(model) for model in models]
    check_same_layers([*layers, *([atomized(reference)] if reference is not None else [])])
    shared = {
        name: (
            _common_coefficients([_filters(convs[name]) for convs in layers], layers[0][name])
            if reference is None
            else atomized(reference)[name].coefficients.detach().clone()
        )
        for name in layers[0]
    }
    # Compute all weights first, because a network may occur twice.
    original = [{name: _filters(conv) for name, conv in convs.items()} for convs in layers]
    return [
        Truncation({name: _replace_coefficients(conv, shared[name], weights[name]) for name, conv in convs.items()})
        for convs, weights in zip(layers, original, strict=True)
    ]


def train_atoms_only(model: nn.Module, also: Iterable[str] = ()) -> list[nn.Parameter]:
    """Make only the atoms of a network and selected modules trainable.

    Running statistics of batch normalization are not parameters: they change in training mode; set these modules to
    evaluation mode to freeze them.

    Args:
        model: An atomized network.
        also: Names of additional modules to train, for example the classifier.

    Returns:
        The trainable parameters, for an optimizer. All remaining parameters get ``requires_grad=False``.

    Raises:
        ValueError: If the network is not atomized, or a module is unknown or does not have parameters. The network is
            then not modified.

    Example:
        >>> from hf_stitch_filter_atoms import atomize
        >>> net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 2))
        >>> _ = atomize(net)
        >>> [tuple(p.shape) for p in train_atoms_only(net, also=["2"])]
        [(9, 3, 3), (2, 4), (2,)]
    """
    if isinstance(also, str):
        raise ValueError(f"also must be a list of module names, got the string {also!r}")
    trainable_ids = {id(conv.atoms) for conv in atomized(model).values()}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in also:
        if name not in modules:
            raise ValueError(f"module {name!r} does not exist; modules: {', '.join(repr(n) for n in modules if n)}")
        parameter_ids = [id(parameter) for parameter in modules[name].parameters()]
        if not parameter_ids:
            raise ValueError(f"module {name!r} must have parameters")
        trainable_ids.update(parameter_ids)
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trainable_ids)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def check_same_layers(layers: Sequence[dict[str, AtomConv2d]]) -> None:
    """Raise a ``ValueError`` if the convolutions of networks differ in names or shapes.

    Args:
        layers: For each network, name -> convolution with atoms.
    """
    first = layers[0]
    for convs in layers[1:]:
        if first.keys() != convs.keys():
            missing = sorted(first.keys() ^ convs.keys())[0]
            raise ValueError(f"all networks must have atoms at layer {missing!r}")
        for name, conv in first.items():
            expected, actual = ((*c.coefficients.shape, *c.kernel_size) for c in (conv, convs[name]))
            if expected != actual:
                raise ValueError(
                    f"layer {name!r} must have equal (out, in / groups, atoms, kernel), got {expected} and {actual}"
                )


def _filters(conv: AtomConv2d) -> Tensor:
    """Return the spatial filters of a convolution in float64 on the CPU, ``(out·in / groups, kh·kw)``."""
    return conv.coefficients.detach().cpu().double().flatten(0, 1) @ conv.atoms.detach().cpu().double().flatten(1)


def _common_coefficients(filters: Sequence[Tensor], reference: AtomConv2d) -> Tensor:
    """Return the orthonormal coefficients that approximate all filters best, from the Gram matrix of their columns."""
    stacked = torch.cat(list(filters), 1)
    count = reference.coefficients.shape[2]
    directions = torch.linalg.eigh(stacked.T @ stacked).eigenvectors.flip(1)[:, :count]
    columns = torch.linalg.qr(stacked @ directions).Q
    columns = nn.functional.pad(columns, (0, count - columns.shape[1]))  # fewer filters than atoms
    return columns.view(reference.coefficients.shape).to(reference.coefficients)


def _replace_coefficients(conv: AtomConv2d, coefficients: Tensor, weight: Tensor) -> float:
    """Replace the coefficients, fit the atoms to the filters, and return the relative error of the weight."""
    new_coefficients = coefficients.to(conv.coefficients)
    atoms = torch.linalg.pinv(new_coefficients.cpu().double().flatten(0, 1)) @ weight
    with torch.no_grad():
        conv.coefficients.copy_(new_coefficients)
        conv.atoms.copy_(atoms.view_as(conv.atoms))
    return relative_error(weight.view(*conv.coefficients.shape[:2], *conv.kernel_size), conv)
