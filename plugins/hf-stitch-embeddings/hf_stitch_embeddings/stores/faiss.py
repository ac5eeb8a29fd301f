"""Queries of a new encoder over a FAISS index of old vectors, which stays as it is."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from hf_stitch_embeddings.embedding_map import EmbeddingMap
from hf_stitch_embeddings.export.sentence_transformers import dense_layers

CHANGES = ("add", "add_with_ids", "train")


def search_mapped(index: Any, embedding_map: EmbeddingMap) -> Any:
    """Put a map of queries before a FAISS index.

    The result is an ``IndexPreTransform``: it maps queries and searches the index, which is not copied.
    ``faiss.write_index`` saves both in one file that needs no other code to search.

    It would map whatever is added to it, too, although documents belong into the old space. ``add``, ``add_with_ids``
    and ``train`` of the result therefore raise an error; a file that is read again has no such guard. Add documents,
    embedded by the *old* encoder, to the index itself.

    Args:
        index: Any FAISS index of old vectors (flat, HNSW, IVF, quantised).
        embedding_map: An affine map of direction ``query`` or ``adjoint``.

    Returns:
        The index that takes queries of the new encoder.

    Raises:
        ValueError: If the map applies to documents, is no sequence of linear layers, stands for the old model, or its
            width or metric is not that of the index.
        ImportError: If faiss is not installed.

    Example:
        >>> import faiss, torch
        >>> from hf_stitch.stitches import LinearStitch
        >>> index = faiss.IndexFlatIP(2)
        >>> index.add(np.eye(2, dtype=np.float32))
        >>> swapped = LinearStitch.of(weight=torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
        >>> chain = search_mapped(index, EmbeddingMap.of(swapped, direction="query"))
        >>> chain.search(np.array([[3.0, 1.0, 9.0]], dtype=np.float32), 2)[1].tolist()
        [[1, 0]]
    """
    import faiss

    if embedding_map.direction == "index" or embedding_map.keeps_old:
        raise ValueError(
            f"{embedding_map!r} is no map of new queries: "
            + (
                "keep the old queries"
                if embedding_map.keeps_old
                else "rewrite the index with it, or take its adjoint()"
            )
        )
    if embedding_map.out_features != index.d:
        raise ValueError(
            f"{embedding_map!r} makes vectors of width {embedding_map.out_features}, the index has {index.d}"
        )
    inner = index.metric_type == faiss.METRIC_INNER_PRODUCT
    if inner == (embedding_map.metric == "l2"):
        has = "inner products" if inner else "Euclidean distances"
        raise ValueError(f"{embedding_map!r} is a map for {embedding_map.metric}, and the index has {has}")
    layers = dense_layers(embedding_map)
    if any(layer.activation.__name__ != "Identity" for layer in layers):
        raise ValueError(f"{embedding_map!r} is not linear, and FAISS has linear transforms only: map queries yourself")
    chain = faiss.IndexPreTransform(index)
    chain.own_fields = False
    # What is prepended last runs first.
    if embedding_map.normalized:
        chain.prepend_transform(faiss.NormalizationTransform(index.d))
    for layer in reversed(layers):
        transform = faiss.LinearTransform(layer.weight.shape[1], layer.weight.shape[0], layer.bias is not None)
        faiss.copy_array_to_vector(np.ascontiguousarray(layer.weight.numpy(), np.float32).ravel(), transform.A)
        if layer.bias is not None:
            faiss.copy_array_to_vector(np.ascontiguousarray(layer.bias.numpy(), np.float32), transform.b)
        transform.is_trained = True
        chain.prepend_transform(transform)

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise TypeError(
            "this index maps what it receives from the new space to the old one: add documents, embedded by the old "
            "encoder, to the index behind it"
        )

    for name in CHANGES:
        setattr(chain, name, refuse)
    return chain
