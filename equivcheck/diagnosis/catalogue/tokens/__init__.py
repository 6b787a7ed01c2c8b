"""Known mistakes in token models: labels, positions, heads and embeddings."""
