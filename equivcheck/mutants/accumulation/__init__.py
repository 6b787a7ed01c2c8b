"""Accumulation over microbatches and normalisation of the loss, wrong on purpose."""
