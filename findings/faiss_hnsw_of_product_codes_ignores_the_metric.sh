#!/usr/bin/env bash
# faiss-cpu 1.15.1: index_factory(d, "HNSW8,PQ4x4", METRIC_INNER_PRODUCT) returns an index of Euclidean distances.
#
# The metric is dropped without an error, so that the index ranks longer vectors otherwise than it was asked to. With
# scalar codes ("HNSW8,SQ8") and without codes ("HNSW8") the metric is kept.
#
# Output of version 1.15.1 (numpy 2.4.6):
#   HNSW8: inner product
#   HNSW8,SQ8: inner product
#   HNSW8,PQ4x4: Euclidean distance
#
# Exits with 1 if the metric of the last one is kept, or refused.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet faiss-cpu==1.15.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import faiss

names = {faiss.METRIC_INNER_PRODUCT: "inner product", faiss.METRIC_L2: "Euclidean distance"}
found = {}
for kind in ("HNSW8", "HNSW8,SQ8", "HNSW8,PQ4x4"):
    found[kind] = names[faiss.index_factory(16, kind, faiss.METRIC_INNER_PRODUCT).metric_type]
    print(f"{kind}: {found[kind]}")
sys.exit(0 if list(found.values()) == ["inner product", "inner product", "Euclidean distance"] else 1)
PYTHON
