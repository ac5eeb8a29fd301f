"""One adapter for each model library."""
