"""References to the papers of the methods."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """Reference to a paper."""

    title: str  # authors and title
    url: str  # link to the arXiv page or the DOI


def arxiv(title: str, id: str) -> Paper:
    """Create a reference to a paper on arXiv."""
    return Paper(title, f"https://arxiv.org/abs/{id}")


BALOGH_2025 = arxiv(
    "Balogh & Jelasity: How not to Stitch Representations to Measure Similarity: Task Loss Matching versus Direct "
    "Matching",
    "2412.11299",
)
CSISZARIK_2021 = arxiv("Csiszárik et al.: Similarity and Matching of Neural Network Representations", "2110.14633")
DING_2021 = arxiv("Ding et al.: Grounding Representation Similarity with Statistical Testing", "2108.01661")
HUH_2024 = arxiv("Huh et al.: The Platonic Representation Hypothesis", "2405.07987")
KLABUNDE_2023 = arxiv("Klabunde et al.: Similarity of Neural Network Models: A Survey", "2305.06329")
KORNBLITH_2019 = arxiv("Kornblith et al.: Similarity of Neural Network Representations Revisited", "1905.00414")
KRIEGESKORTE_2008 = Paper(
    "Kriegeskorte et al.: Representational similarity analysis – connecting the branches of systems neuroscience",
    "https://doi.org/10.3389/neuro.06.004.2008",
)
LENC_2015 = arxiv(
    "Lenc & Vedaldi: Understanding image representations by measuring their equivariance and equivalence", "1411.5908"
)
LI_2015 = arxiv(
    "Li et al.: Convergent Learning: Do different neural networks learn the same representations?", "1511.07543"
)
LOPEZ_PAZ_2017 = arxiv("Lopez-Paz & Oquab: Revisiting Classifier Two-Sample Tests", "1610.06545")
MAI_2026 = arxiv("Mai et al.: Revisiting Model Stitching In the Foundation Model Era", "2603.12433")
MAIORCA_2024 = arxiv("Maiorca et al.: Latent space translation via inverse relative projection", "2406.15057")
MORCOS_2018 = arxiv(
    "Morcos et al.: Insights on representational similarity in neural networks with canonical correlation", "1806.05759"
)
MOSCHELLA_2023 = arxiv(
    "Moschella et al.: Relative representations enable zero-shot latent space communication", "2209.15430"
)
NGUYEN_2021 = arxiv(
    "Nguyen et al.: Do Wide and Deep Networks Learn the Same Things? Uncovering How Neural Network Representations "
    "Vary with Width and Depth",
    "2010.15327",
)
RAGHU_2017 = arxiv(
    "Raghu et al.: SVCCA: Singular Vector Canonical Correlation Analysis for Deep Learning Dynamics and "
    "Interpretability",
    "1706.05806",
)
SUN_2022 = arxiv("Sun et al.: Out-of-Distribution Detection with Deep Nearest Neighbors", "2204.06507")
WILLIAMS_2021 = arxiv("Williams et al.: Generalized Shape Metrics on Neural Representations", "2110.14739")
