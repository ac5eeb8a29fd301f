"""Options of everything public: a wrong value is named before any work."""

from __future__ import annotations

from public import Public, choices, outside, publics  # isort: skip

WRONG = "no such choice"
UNCHECKED = {
    "hf_stitch.Representation.check_padding_known: pooling",
    "hf_stitch.Representation.row_samples: pooling",
    "hf_stitch.Representation.to_layout: layout",
    "hf_stitch.SimilarityAtlas.best_matches: axis",
    "hf_stitch.SimilarityAtlas.match_p_values: axis",
    "hf_stitch.StitchedModel.parent: allow_changed",
    "hf_stitch.StitchedModel.parent: side",
    "hf_stitch.Stitcher.attach: allow_changed",
    "hf_stitch.analysis.Identification.favourite: axis",
    "hf_stitch.analysis.Identification.verdicts: axis",
    "hf_stitch.metrics.ActivationMetric.min_rows: side",
    "hf_stitch.plots.strips: parts",
    "hf_stitch.statistics.Statistic.add_state: reduce",
    "hf_stitch.training.DynamicsRecorder: pooling",
    "hf_stitch.training.ProbingCallback: every",
    "hf_stitch.training.SimilarityCallback: pooling",
    "hf_stitch_embeddings.EmbeddingMap.old_model: metric",
    "hf_stitch_filter_atoms.FilterAtomAngle.function: gauge",
    "hf_stitch_filter_atoms.FilterAtoms.function: gauge",
    "registries.metrics[cca].min_rows: side",
    "registries.metrics[linear_cka].min_rows: side",
    "registries.metrics[linear_regression].min_rows: side",
    "registries.metrics[minibatch_cka].min_rows: side",
    "registries.metrics[pwcca].min_rows: side",
    "registries.metrics[rsa].min_rows: side",
    "registries.metrics[shape_distance].min_rows: side",
    "registries.metrics[svcca].min_rows: side",
}
"""Enumerated options that are not checked, or too late. The list may only become shorter."""


def _complaint(each: Public, parameter: str) -> str:
    """What is wrong with the answer to a wrong choice; empty if nothing is."""
    try:
        found = each.run(**{parameter: outside(each.annotation(parameter), WRONG)})
    except ValueError as error:
        told = parameter in str(error) and repr(WRONG) in str(error)
        return "" if told else f"ValueError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"it returned {type(found).__name__}"


def test_every_enumerated_option_is_checked_before_any_work() -> None:
    found = {
        f"{each.name}: {parameter}": _complaint(each, parameter)
        for each in publics()
        for parameter in each.parameters
        if choices(each.annotation(parameter))
    }
    assert len(found) > 80
    failed = {name: complaint for name, complaint in found.items() if complaint}
    assert failed.keys() == UNCHECKED, "\n".join(f"{name}  {why:.150}" for name, why in failed.items())
