"""Composable `replicate` has no issue on file of its own: what goes wrong with it goes wrong with `DistributedDataParallel`."""
