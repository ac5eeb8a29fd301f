"""Architecture overrides for networks of transformers and timm: one file for each family."""
