"""DeepSpeed's pipeline clips by the norm of its first stage.

Two stages train one step with SGD and learning rate 1, so the parameters change by the clipped gradient. Its norm over both
stages should be the limit. `clip_grad_norm_` counts a parameter if `mpu.get_model_parallel_rank() == 0` or if it is
tensor-parallel. In a pipeline, this rank is the stage, so only the first stage's parameters count. ZeRO-1 is right.
Tried with DeepSpeed 0.18.2, 0.19.2, 0.19.3 and 0.19.8 and torch 2.13.0, on the CPU.
"""

import os

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}

from importlib import import_module

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

LIMIT = 0.1


def train(rank: int, stage: int) -> None:
    """Train one step on a rank, and print the norm of the change over both stages."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    import deepspeed

    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # gloo needs no C++ extension
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(0)
    layers = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)]
    inputs, targets = torch.randn(6, 3), torch.randn(6, 2)
    model = deepspeed.pipe.PipelineModule(layers=layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": LIMIT,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.train_batch(iter([(inputs, targets)]))
    squares = sum((new.detach() - old).square().sum() for new, old in zip(model.parameters(), before, strict=True))
    dist.all_reduce(squares)
    if rank == 0:
        print(f"ZeRO-{stage}: the clipped gradient has norm {squares.sqrt():.4f}; it should be {LIMIT}")


if __name__ == "__main__":
    for stage in (0, 1):
        mp.spawn(train, (stage,), nprocs=2)
