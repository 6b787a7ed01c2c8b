"""Training with FullyShardedDataParallel on 2 ranks differs from training on one device.

Known problem of torch: FSDP1 silently accumulates wrong gradients for a flat parameter of one
element (not reported).

First divergence: step 0 gradient 0.weight[0, 0] on rank 0 is 2.051858856906914, expected
2.438122613774206 (value, 8.92e+13 x tolerance).

    torchrun --standalone --nproc-per-node 2 fsdp1_accumulates_one_element.py

Exit code 1 if the runs differ, else 0. Seen on torch 2.13.0, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

torch.set_default_dtype(torch.float64)

PARAMETERS = {"0.weight": [[0.1257302210933933]]}
# Per step and microbatch: inputs, targets.
BATCHES = [
    [
        (
            [[0.1321048632913019], [0.6404226504432821]],
            [[0.10490011715303971], [-0.535669373161111]],
        ),
        (
            [[0.36159505490948474], [1.3040000451301372]],
            [[0.9470809631292422], [-0.7037352358069926]],
        ),
    ]
]
TOLERANCE = 4.3e-15  # four times the measured effect of rounding


def unflattened(label, unit, tensor, gather):
    """Tensors in a unit by name, from the flat shards on all ranks."""
    shards = [tensor]
    if gather:
        shards = [None] * dist.get_world_size()
        dist.all_gather_object(shards, tensor if tensor is None else tensor.detach())
    flat = torch.cat([shard.detach().flatten() for shard in shards if shard is not None])
    sizes = [shape.numel() for shape in unit.values()]
    parts = flat[: sum(sizes)].split(sizes)
    return {f"{label} {name}": part.view(unit[name]) for name, part in zip(unit, parts)}


def train(parallel: bool) -> dict[str, torch.Tensor | None]:
    """Train on one device or in parallel, and return the tensors of every step."""
    model = module = nn.Sequential(nn.Linear(1, 1, bias=False))
    model.load_state_dict({name: torch.tensor(values) for name, values in PARAMETERS.items()})
    units = [{name: parameter.shape} for name, parameter in model.named_parameters()]
    if parallel:
        units = [{name: parameter.shape for name, parameter in model.named_parameters()}]
        module = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=False
        )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    left = {}
    for step, microbatches in enumerate(BATCHES):
        optimizer.zero_grad()
        total = torch.zeros(())
        for batch in microbatches:
            inputs, targets = map(torch.tensor, batch)
            if parallel:
                inputs, targets = (values.chunk(2)[dist.get_rank()] for values in (inputs, targets))
            loss = (module(inputs) - targets).sum()
            if parallel:
                loss = loss * 2  # ranks average their gradients
            loss.backward()
            total = total + loss.detach()
        if parallel:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        left[f"step {step} loss"] = total
        for unit, parameter in zip(units, module.parameters(), strict=True):
            left |= unflattened(f"step {step} gradient", unit, parameter.grad, parallel)
        optimizer.step()
        for unit, parameter in zip(units, module.parameters(), strict=True):
            left |= unflattened(f"step {step} parameter", unit, parameter, parallel)
    return left


def main() -> int:
    """Train on one device and in parallel, and compare everything."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    expected, actual = train(parallel=False), train(parallel=True)
    code = 0
    for name, values in expected.items():
        difference = (actual[name] - values).abs().max()
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{name}: max difference {float(difference)}")
        code |= not float(difference) <= TOLERANCE
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
