"""Shared parts of the experiments: options, pages and claims."""

from functools import partial

import study

PAPER_TITLE = "Inner product-based neural network similarity (Chen, Miao & Qiu, NeurIPS 2023)"
DEMONSTRATION = (
    "A demonstration, not a reproduction: the CIFAR-100 at hand has 6,000 training and 4,000 test images of 100 "
    "classes, and its split is not the official one."
)
OPTIONS = ("data-dir", "published", "networks")
claim = partial(study.claim, "3")
Claim = partial(study.Claim, "3")
leave = partial(study.leave, null=True)


def footer(name: str, options: str = "--published PUBLISHED --networks NETWORKS --data-dir DATA --out OUT") -> str:
    """Return the end of a page: the record, and the command of the script, which has the same name."""
    return study.footer(name, f"filter_atoms.{name}", options)
