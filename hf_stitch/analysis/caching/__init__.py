"""Activations that are kept on disk and used again."""
