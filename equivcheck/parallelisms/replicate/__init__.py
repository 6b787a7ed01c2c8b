"""Composable `replicate`."""
