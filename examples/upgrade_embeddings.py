"""Serve a new embedding model on an old index: map the vectors instead of embedding all documents again."""

import numpy as np
from hf_stitch_embeddings import evaluate_retrieval, fit_embedding_map, verdict

# In practice, embeddings of the same texts by both models. Here, two models see the same eight hidden quantities.
random = np.random.default_rng(0)
hidden = random.normal(size=(3000, 8))
old, new = (np.tanh(hidden @ random.normal(size=(8, width)) / 3).astype("float32") for width in (24, 32))
pairs, index, queries = slice(0, 1000), slice(1000, 2900), slice(2900, 3000)

embedding_map = fit_embedding_map(old[pairs], new[pairs], map="ridge", direction="index", index_size=1900)
result = evaluate_retrieval(embedding_map, old[index], new[index], old[queries], new[queries], k=10)
print(result)
print(verdict(embedding_map, result=result, threshold=0.7))
