"""Registries: from a name to the class or function behind it, imported when it is asked for.

What the package itself offers stands in one table, :data:`BUILT_INS`. Other distributions add to it by entry points in
the group ``hf_stitch.<registry>``, for example in their ``pyproject.toml``::

    [project.entry-points."hf_stitch.matchers"]
    diagonal = "hf_stitch_diagonal:Diagonal"
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, TypeVar, overload

__all__ = ["PluginError", "Registries", "Registry", "UnknownNameError", "did_you_mean", "registries"]

F = TypeVar("F", bound=Callable[..., Any])

BUILT_INS: dict[str, dict[str, str]] = {
    "adapters": {
        "timm": "hf_stitch.adapters.libraries.timm:TimmAdapter",
        "torch": "hf_stitch.adapters.libraries.torch:TorchAdapter",
        "transformers": "hf_stitch.adapters.libraries.transformers:TransformersAdapter",
    },
    "overrides": {
        "transformers.ASTPreTrainedModel": "hf_stitch.adapters.overrides.speech:OfSpectrograms",
        "transformers.CLIPTextModel": "hf_stitch.adapters.overrides.clip:OfTexts",
        "transformers.CLIPTextModelWithProjection": "hf_stitch.adapters.overrides.clip:OfTexts",
        "transformers.Data2VecAudioPreTrainedModel": "hf_stitch.adapters.overrides.speech:OfWaveforms",
        "transformers.HubertPreTrainedModel": "hf_stitch.adapters.overrides.speech:OfWaveforms",
        "transformers.PerceiverForImageClassificationLearned": "hf_stitch.adapters.overrides.perceiver:OfImages",
        "transformers.PerceiverForMaskedLM": "hf_stitch.adapters.overrides.perceiver:OfTexts",
        "transformers.PerceiverForSequenceClassification": "hf_stitch.adapters.overrides.perceiver:OfTexts",
        "transformers.SEWDPreTrainedModel": "hf_stitch.adapters.overrides.speech:OfWaveforms",
        "transformers.SEWPreTrainedModel": "hf_stitch.adapters.overrides.speech:OfWaveforms",
        "transformers.Siglip2ForImageClassification": "hf_stitch.adapters.overrides.siglip2:OfPatches",
        "transformers.UniSpeechPreTrainedModel": "hf_stitch.adapters.overrides.speech:OfWaveforms",
        "transformers.UniSpeechSatPreTrainedModel": "hf_stitch.adapters.overrides.speech:OfWaveforms",
        "transformers.Wav2Vec2ConformerPreTrainedModel": "hf_stitch.adapters.overrides.speech:OfWaveforms",
        "transformers.Wav2Vec2PreTrainedModel": "hf_stitch.adapters.overrides.speech:OfWaveforms",
        "transformers.WavLMPreTrainedModel": "hf_stitch.adapters.overrides.speech:OfWaveforms",
        "transformers.WhisperPreTrainedModel": "hf_stitch.adapters.overrides.speech:OfWhisper",
    },
    "stitches": {
        "identity": "hf_stitch.stitches.identity:IdentityStitch",
        "linear": "hf_stitch.stitches.linear:LinearStitch",
        "low_rank": "hf_stitch.stitches.low_rank:LowRankStitch",
        "masked": "hf_stitch.stitches.masked:MaskedStitch",
        "relative": "hf_stitch.relative.projection:RelativeProjection",
    },
    "matchers": {
        "identity": "hf_stitch.matchers.identity:Identity",
        "inverse_relative": "hf_stitch.matchers.inverse_relative:InverseRelative",
        "lasso": "hf_stitch.matchers.lasso:Lasso",
        "low_rank": "hf_stitch.matchers.low_rank:LowRank",
        "lstsq": "hf_stitch.matchers.lstsq:Lstsq",
        "permutation": "hf_stitch.matchers.permutation:Permutation",
        "procrustes": "hf_stitch.matchers.procrustes:Procrustes",
        "random": "hf_stitch.matchers.random:Random",
        "ridge": "hf_stitch.matchers.ridge:Ridge",
        "task_loss": "hf_stitch.training.task_loss:TaskLoss",
    },
    "metrics": {
        "accuracy_difference": "hf_stitch.metrics._outputs:AccuracyDifference",
        "cca": "hf_stitch.metrics._cca:CCA",
        "correlation_matching": "hf_stitch.metrics._matching:CorrelationMatching",
        "direct_matching": "hf_stitch.metrics._regression:DirectMatching",
        "disagreement": "hf_stitch.metrics._outputs:Disagreement",
        "distance_correlation": "hf_stitch.metrics._rsa:DistanceCorrelation",
        "jaccard": "hf_stitch.metrics._neighbours:Jaccard",
        "jensen_shannon": "hf_stitch.metrics._outputs:JensenShannon",
        "linear_cka": "hf_stitch.metrics._cka:LinearCKA",
        "linear_regression": "hf_stitch.metrics._regression:LinearRegression",
        "minibatch_cka": "hf_stitch.metrics._cka:MinibatchCKA",
        "mrr": "hf_stitch.metrics._neighbours:MRR",
        "mutual_knn": "hf_stitch.metrics._neighbours:MutualKNN",
        "paired_cosine": "hf_stitch.metrics._neighbours:PairedCosine",
        "procrustes": "hf_stitch.metrics._procrustes:Procrustes",
        "pwcca": "hf_stitch.metrics._cca:PWCCA",
        "rank_similarity": "hf_stitch.metrics._neighbours:RankSimilarity",
        "rbf_cka": "hf_stitch.metrics._cka:RBFCKA",
        "relative_cosine": "hf_stitch.metrics._relative:RelativeCosine",
        "rsa": "hf_stitch.metrics._rsa:RSA",
        "second_order_cosine": "hf_stitch.metrics._neighbours:SecondOrderCosine",
        "shape_distance": "hf_stitch.metrics._shape:ShapeDistance",
        "soft_matching": "hf_stitch.metrics._matching:SoftMatching",
        "svcca": "hf_stitch.metrics._cca:SVCCA",
    },
    "similarities": {
        "angular": "hf_stitch.relative.similarities:Angular",
        "change_of_basis": "hf_stitch.relative.similarities:ChangeOfBasis",
        "cosine": "hf_stitch.relative.similarities:Cosine",
        "euclidean": "hf_stitch.relative.similarities:Euclidean",
        "geodesic": "hf_stitch.relative.similarities:Geodesic",
        "inner": "hf_stitch.relative.similarities:Inner",
        "lp": "hf_stitch.relative.similarities:Lp",
    },
    "anchors": {
        "bootstrap": "hf_stitch.relative.bootstrap:Bootstrap",
        "farthest_point": "hf_stitch.relative.selection:FarthestPoint",
        "frequency": "hf_stitch.relative.selection:Frequency",
        "kmeans": "hf_stitch.relative.selection:KMeans",
        "ood": "hf_stitch.relative.selection:OutOfDomain",
        "parallel": "hf_stitch.relative.selection:Parallel",
        "random": "hf_stitch.relative.selection:Random",
        "stratified": "hf_stitch.relative.selection:Stratified",
    },
}
"""Every built-in name of every registry, as ``module:attribute``."""


class UnknownNameError(ValueError, KeyError):
    """A registry has no such name; the message lists what it has."""

    # KeyError would show the message in quotes, as if it were a key.
    __str__ = Exception.__str__


class PluginError(ImportError):
    """A plugin is installed but what it announces cannot be imported; ``__cause__`` is the reason."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """The option that resembles a mistyped name most, or an empty string if none does.

    Args:
        name: What was asked for.
        options: What there is.

    Example:
        >>> did_you_mean("procustes", ["lstsq", "procrustes", "ridge"])
        'procrustes'
        >>> did_you_mean("transformer", ["lstsq", "procrustes", "ridge"])
        ''
    """
    by_lower = {option.lower(): option for option in options}
    closest = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[closest[0]] if closest else ""


class Registry:
    """The names of one kind of thing (matchers, metrics, …) and what stands behind each.

    Listing names imports nothing; :meth:`get` imports the one thing asked for. What the package offers itself cannot be
    replaced: a plugin of the same name is left out with a warning, a run-time registration is refused.

    Args:
        kind: The plural that names the registry; plugins announce themselves in the group ``hf_stitch.<kind>``.
        built_ins: From name to ``module:attribute``.

    Example:
        >>> shapes = Registry("shapes", {"ordered": "collections:OrderedDict"})
        >>> shapes.get("ordered")
        <class 'collections.OrderedDict'>
        >>> @shapes.register("plain")
        ... def plain() -> dict:
        ...     return {}
        >>> shapes.names()
        ('ordered', 'plain')
        >>> shapes.origin("plain")
        'registered at run time'
    """

    def __init__(self, kind: str, built_ins: Mapping[str, str]) -> None:
        self.kind = kind
        self._built_ins = dict(built_ins)
        self._registered: dict[str, Callable[..., Any]] = {}

    def __repr__(self) -> str:
        """For example ``<registry of matchers: identity, low_rank, lstsq>``."""
        return f"<registry of {self.kind}: {', '.join(self.names())}>"

    def __contains__(self, name: object) -> bool:
        """Whether there is such a name; imports nothing."""
        return name in self._built_ins or name in self._registered or name in self._plugins

    def __iter__(self) -> Iterator[str]:
        """The names, sorted."""
        return iter(self.names())

    def names(self) -> tuple[str, ...]:
        """All names, sorted. Imports nothing, and lists plugins that will turn out to be broken."""
        return tuple(sorted({*self._built_ins, *self._plugins, *self._registered}))

    def get(self, name: str) -> Any:
        """The class or function behind a name.

        Raises:
            UnknownNameError: If there is no such name.
            PluginError: If it belongs to a plugin that cannot be imported.
        """
        self._check_known(name)
        if name in self._registered:
            return self._registered[name]
        if name in self._built_ins:
            return resolve_name(self._built_ins[name])
        entry = self._plugins[name]
        try:
            return entry.load()
        except Exception as error:
            raise PluginError(
                f"{name!r} among {self.kind} comes from the {_describe(entry)}, which cannot be imported "
                f"({entry.value}): {type(error).__name__}: {error}. Repair or uninstall that distribution."
            ) from error

    @overload
    def register(self, name: str, factory: F) -> F: ...
    @overload
    def register(self, name: str, factory: None = None) -> Callable[[F], F]: ...
    def register(self, name: str, factory: F | None = None) -> F | Callable[[F], F]:
        """Add a name for the life of this process; without ``factory``, a decorator.

        Args:
            name: The new name.
            factory: The class or function behind it; returned as it is.

        Raises:
            ValueError: If the name is taken.
        """
        if factory is None:
            return lambda decorated: self.register(name, decorated)
        if name in self:
            raise ValueError(
                f"{name!r} among {self.kind} is taken ({self.origin(name)}, {self._holder(name)}); choose another name"
            )
        self._registered[name] = factory
        return factory

    def origin(self, name: str) -> str:
        """Where a name comes from: ``built-in``, ``plugin <distribution> <version>`` or ``registered at run time``.

        Raises:
            UnknownNameError: If there is no such name.
        """
        self._check_known(name)
        if name in self._built_ins:
            return "built-in"
        return _describe(self._plugins[name]) if name in self._plugins else "registered at run time"

    def _check_known(self, name: str) -> None:
        if name not in self:
            hint = did_you_mean(name, self.names())
            raise UnknownNameError(
                f"no {name!r} among {self.kind}{f'; did you mean {hint!r}?' if hint else '.'} "
                f"There are: {', '.join(self.names()) or 'none'}"
            )

    def _holder(self, name: str) -> str:
        """The dotted name of what stands behind a name, without importing it."""
        if name in self._registered:
            return repr(self._registered[name])
        return self._built_ins[name] if name in self._built_ins else self._plugins[name].value

    @cached_property
    def _plugins(self) -> dict[str, EntryPoint]:
        """What other distributions announce, read once; of a name announced twice the first distribution keeps it."""
        plugins: dict[str, EntryPoint] = {}
        for entry in sorted(entry_points(group=f"hf_stitch.{self.kind}"), key=_describe):
            if entry.name in self._built_ins or entry.name in plugins:
                holder = _describe(plugins[entry.name]) if entry.name in plugins else "a built-in"
                warnings.warn(
                    f"the {_describe(entry)} announces {entry.name!r} among {self.kind}, a name held by {holder}: "
                    f"it is left out. Its author should choose another name.",
                    stacklevel=2,
                )
            else:
                plugins[entry.name] = entry
        return plugins


@dataclass(frozen=True)
class Registries:
    """All registries, by attribute or by name; iterating gives the names.

    Example:
        >>> "lstsq" in registries.matchers
        True
        >>> registries["stitches"] is registries.stitches
        True
        >>> list(registries)
        ['adapters', 'overrides', 'stitches', 'matchers', 'metrics', 'similarities', 'anchors']
    """

    adapters: Registry
    overrides: Registry
    stitches: Registry
    matchers: Registry
    metrics: Registry
    similarities: Registry
    anchors: Registry

    def __iter__(self) -> Iterator[str]:
        """The names of the registries."""
        return (field.name for field in fields(self))

    def __getitem__(self, kind: str) -> Registry:
        """The registry of this name.

        Raises:
            UnknownNameError: If there is none.
        """
        if kind not in tuple(self):
            raise UnknownNameError(f"no registry {kind!r}; there are: {', '.join(self)}")
        registry: Registry = getattr(self, kind)
        return registry


registries = Registries(**{kind: Registry(kind, built_ins) for kind, built_ins in BUILT_INS.items()})


def _describe(entry: EntryPoint) -> str:
    """The distribution that an entry point comes from, for example ``plugin hf-stitch-diagonal 0.1.0``."""
    return f"plugin {entry.dist.name} {entry.dist.version}" if entry.dist else f"plugin {entry.value}"
