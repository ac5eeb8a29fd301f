"""Export of maps to formats that run without hf-stitch."""

from hf_stitch_embeddings.export.onnx import export_onnx
from hf_stitch_embeddings.export.sentence_transformers import (
    DenseLayer,
    check_text_embeddings_inference,
    dense_layers,
    export_query_document,
    export_sentence_transformer,
)

__all__ = [
    "DenseLayer",
    "check_text_embeddings_inference",
    "dense_layers",
    "export_onnx",
    "export_query_document",
    "export_sentence_transformer",
]
