"""`torch.distributed.pipelining`."""
