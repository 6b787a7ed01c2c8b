"""Token models, wrong on purpose: labels, positions, heads, embeddings."""
