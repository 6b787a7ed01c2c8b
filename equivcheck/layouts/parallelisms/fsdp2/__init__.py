"""`torch.distributed.fsdp.fully_shard`."""
