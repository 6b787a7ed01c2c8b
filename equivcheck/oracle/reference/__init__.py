"""The single-device run, its rounding noise, and the steps in which it proves nothing."""
