"""Running one part of a network, before or after a cut, without the other part."""
