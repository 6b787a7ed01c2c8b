"""Known mistakes in expert layers."""
