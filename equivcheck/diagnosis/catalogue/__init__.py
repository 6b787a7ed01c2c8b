"""The ways in which a parallel training is known to go wrong, each tried as a training without ranks."""
