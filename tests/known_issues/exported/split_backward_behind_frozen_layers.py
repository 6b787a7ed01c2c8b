"""Training with a pipeline on 2 ranks differs from training on one device.

Known problem of torch: Zero-bubble schedules silently give no gradient to a stage behind frozen
layers (not reported).

First divergence: step 0 gradient 1.weight on rank 1 is None, expected a tensor (missing, inf x
tolerance).

    torchrun --standalone --nproc-per-node 2 split_backward_behind_frozen_layers.py

Exit code 1 if the runs differ, else 0. Seen on torch 2.13.0, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.nn.functional import mse_loss

torch.set_default_dtype(torch.float64)

PARAMETERS = {
    "0.weight": [[0.1257302210933933]],
    "0.bias": [0.2302132862361297],
    "1.weight": [[0.6404226504432821]],
    "1.bias": [0.4834723644714709],
}
# Per step: inputs, targets.
BATCHES = [
    ([[0.535669373161111], [0.36159505490948474]], [[1.3040000451301372], [0.9470809631292422]])
]
STAGES = [range(0, 1), range(1, 2)]  # layers of each
TOLERANCE = 3.5e-15  # four times the measured effect of rounding


def loss_fn(outputs, targets):
    """A chunk's share of the step's loss."""
    return mse_loss(outputs, targets) / 2


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of the tensor, or None."""
    return None if tensor is None else tensor.detach().clone()


def distance(actual: torch.Tensor | None, expected: torch.Tensor | None) -> torch.Tensor:
    """Largest difference of two tensors; infinite if only one of them is None."""
    if actual is None or expected is None:
        return torch.tensor(0.0 if actual is expected else torch.inf)
    return (actual - expected).abs().max()


def train(parallel: bool) -> dict[str, torch.Tensor | None]:
    """Train on one device or in parallel, and return the tensors of every step."""
    model = nn.Sequential(nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1))
    model.load_state_dict({name: torch.tensor(values) for name, values in PARAMETERS.items()})
    if parallel:
        numbers = (dist.get_rank(),)
        stages = [
            PipelineStage(
                model[STAGES[number].start : STAGES[number].stop], number, 2, torch.device("cpu")
            )
            for number in numbers
        ]
        pipe = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=loss_fn, scale_grads=False)
        for index in range(2):
            if not any(index in STAGES[number] for number in numbers):
                model[index] = nn.Identity()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    left = {}
    for step, batch in enumerate(BATCHES):
        optimizer.zero_grad()
        inputs, targets = map(torch.tensor, batch)
        if parallel:
            losses = []
            pipe.step(
                *([inputs] if dist.get_rank() == 0 else []),
                target=targets if dist.get_rank() == 1 else None,
                losses=losses,
            )
            total = sum(losses, torch.zeros(())).detach()
        else:
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            total = loss.detach()
        if not parallel or dist.get_rank() == 1:
            left[f"step {step} loss"] = total
        for name, parameter in model.named_parameters():
            left[f"step {step} gradient {name}"] = full(parameter.grad)
        optimizer.step()
        for name, parameter in model.named_parameters():
            left[f"step {step} parameter {name}"] = full(parameter)
    return left


def main() -> int:
    """Train on one device and in parallel, and compare everything."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    expected, actual = train(parallel=False), train(parallel=True)
    code = 0
    for name, values in expected.items():
        difference = torch.zeros(())
        if name in actual:
            difference = distance(actual[name], values)
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{name}: max difference {float(difference)}")
        code |= not float(difference) <= TOLERANCE
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
