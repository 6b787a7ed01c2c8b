"""Known faults in parallel training, each replayed as a training without ranks."""
