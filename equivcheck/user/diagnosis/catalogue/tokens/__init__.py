"""Mistakes in trainings on tokens: attention masks, positions, labels and cross-entropies."""
