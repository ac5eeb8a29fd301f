"""One adapter for each library of models."""
