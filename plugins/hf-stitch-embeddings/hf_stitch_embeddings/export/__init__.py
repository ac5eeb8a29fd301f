"""Maps in the formats that other software serves; none of it needs hf-stitch any more."""

from hf_stitch_embeddings.export.sentence_transformers import dense_layers, export_sentence_transformer

__all__ = ["dense_layers", "export_sentence_transformer"]
