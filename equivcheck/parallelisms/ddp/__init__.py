"""`torch.nn.parallel.DistributedDataParallel`."""
