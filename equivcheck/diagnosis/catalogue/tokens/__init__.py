"""Ways in which models of tokens go wrong: labels, positions, heads, embeddings."""
