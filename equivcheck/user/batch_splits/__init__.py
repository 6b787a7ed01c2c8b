"""Batches split into microbatches in other ways."""
