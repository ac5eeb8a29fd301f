"""Overrides of networks of transformers and timm: a file for each family."""
