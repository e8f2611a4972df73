"""The nodes of a graph: what is to be computed, and how each node makes any region of itself."""
