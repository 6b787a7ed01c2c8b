"""The single-device run, the noise of its rounding, and where it proves nothing."""
