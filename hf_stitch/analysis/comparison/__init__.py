"""Comparison of all layers of two networks in one pass over the samples."""
