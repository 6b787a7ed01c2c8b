"""`torch.distributed.fsdp.FullyShardedDataParallel`."""
