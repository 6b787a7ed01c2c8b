"""`torch.distributed.tensor.parallel.parallelize_module`."""
