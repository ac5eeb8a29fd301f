"""What is found when a network is to be cut, and what to do where it cannot be."""
