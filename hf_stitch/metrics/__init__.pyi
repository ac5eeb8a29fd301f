from ._cca import cca as cca, pwcca as pwcca, svcca as svcca
from ._cka import linear_cka as linear_cka, minibatch_cka as minibatch_cka, rbf_cka as rbf_cka
from ._evaluate import SimilarityMetric as SimilarityMetric
from ._neighbours import jaccard as jaccard, mrr as mrr, mutual_knn as mutual_knn, paired_cosine as paired_cosine
from ._outputs import disagreement as disagreement, jensen_shannon as jensen_shannon
from ._regression import direct_matching as direct_matching, linear_regression as linear_regression
from ._relations import relative_cosine as relative_cosine, rsa as rsa
from ._rows import of_rows as of_rows
from ._shapes import procrustes as procrustes, shape_distance as shape_distance
from .base import (
    ActivationMetric as ActivationMetric,
    FeaturesMetric as FeaturesMetric,
    MeanMetric as MeanMetric,
    Metric as Metric,
    MomentsMetric as MomentsMetric,
    NotComparable as NotComparable,
    WeightMetric as WeightMetric,
)
