"""How each rank runs its part: compiled, traced as one graph, with activation checkpointing."""
