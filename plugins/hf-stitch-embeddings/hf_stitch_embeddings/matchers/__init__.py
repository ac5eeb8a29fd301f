"""Matchers that are fitted to rows: of pairs, of few pairs and other rows, and of none."""
