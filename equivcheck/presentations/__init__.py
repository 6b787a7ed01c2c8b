"""Take a batch apart into examples, and present them again: in other microbatches, padded, packed, or distributed over ranks."""
