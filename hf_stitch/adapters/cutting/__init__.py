"""Running the part of a network before a cut, or the part after it, without the other."""
