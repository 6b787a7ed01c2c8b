"""Known mistakes in parallel training. Each is tried as a training without ranks."""
