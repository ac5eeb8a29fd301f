"""Maps in vector stores."""
