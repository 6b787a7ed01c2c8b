"""Training with DTensor propagation on 2 ranks differs from training on one device.

Known problem of torch: Fused Adam and AdamW on CPU silently update the wrong elements if strides
differ (not reported).

First divergence: step 0 parameter 1.weight[1, 2] on rank 0 is -0.041928602517888124, expected
-0.1419286020978991 (value, 6.28e+13 x tolerance).

    torchrun --standalone --nproc-per-node 2 fused_adam_strided_gradient.py

Exit code 1 if the runs differ, else 0. Seen on torch 2.13.0, CPU, gloo.
"""

import sys
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

torch.set_default_dtype(torch.float64)

PARAMETERS = {
    "0.weight": [
        [
            0.04445234596761114, 0.046706122330500685, 0.2264235994769533, 0.03708779209308882,
            0.18938772311808436, 0.1278431576850093, 0.461033637289542, 0.33484368568068684,
        ],
        [
            -0.24880797869951926, -0.44739405161786006, -0.22036079950028123, 0.01461094011780558,
            -0.8220225136072656, -0.07735453461689562, -0.44049603977859864, -0.25889560607617274,
        ],
        [
            -0.19242460875004835, -0.11182899272949726, 0.14553337180680256, 0.3685841365052769,
            -0.04544386589262693, 0.4831177931346935, -0.23518183221577788, 0.12427757710906642,
        ],
    ],
    "0.bias": [0.11538511148125385, -0.11632244573811656, 0.497209935789211],
    "1.weight": [
        [0.5321583941017076, 0.264268128664082, 0.12712971380967591],
        [-0.5829033300448302, -0.12076757446007827, -0.09192860233584454],
        [0.3122573439083716, 0.12393350216304477, 0.2051745292268452],
        [-0.377488123651557, -0.07483246630316599, 0.45262844867797203],
        [0.8622328737093773, -0.7269218238876932, 0.8740642988781722],
        [0.7770415382164152, 0.4510903475153154, 0.15268352935933555],
        [-0.18124342147737155, 0.8417886341241053, 1.1317556666835897],
        [1.0401743770986238, 0.7592755125816788, 0.20633367629704724],
    ],
    "1.bias": [
        0.26063055700704785, 0.3764842308107038, -0.44143196519480565, -0.16388293945433963,
        -0.34972053310516094, -0.049660633350713024, 0.29632427028729424, -0.26935779100625257,
    ],
}
# Per step: inputs, targets.
BATCHES = [
    (
        [
            [
                0.6617025720390349, 0.43643524714322124, 1.169801907772864, 1.739367877130134,
                0.4959107284421519, 0.3289696294602021, 0.258572545473924, 1.5834728788021222,
            ],
            [
                1.3203609870818391, 0.6333526228249152, -2.2035098806466507, 0.05202897425988651,
                0.6836861907765345, 1.0039615758421696, -0.6179070447076008, 1.8220113633283233,
            ],
        ],
        [
            [
                -1.3204309700132935, -0.6615280218152191, 0.9350499881140221, 0.049054613825311656,
                2.002392583645255, 0.18851919251246557, -0.6331940901922267, -0.37756350523280824,
            ],
            [
                -1.0911461176191954, -1.277680166386608, 0.6304114907682319, 0.5811658124128057,
                1.294558819441117, -0.7546057912599311, 1.689107452443673, -0.2873877078086663,
            ],
        ],
    )
]
TOLERANCE = 4.5e-14  # four times the measured effect of rounding


def distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make each parameter a DTensor."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            setattr(module, name, nn.Parameter(spread, parameter.requires_grad))


def by_rows(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """DTensor sharded along `dim`; this rank keeps its rows, with their strides."""
    rows = whole.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    return DTensor.from_local(rows, mesh, [Shard(dim)], run_check=False)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the full tensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(parallel: bool) -> dict[str, torch.Tensor | None]:
    """Train on one device or in parallel, and return the tensors of every step."""
    model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8))
    model.load_state_dict({name: torch.tensor(values) for name, values in PARAMETERS.items()})
    if parallel:
        mesh = init_device_mesh("cpu", (2,))
        distribute(model, mesh)
        for parameter in model.parameters():
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                redistribute = partial(DTensor.redistribute, placements=parameter.placements)
                parameter.register_hook(redistribute)  # before gradients are accumulated
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0, fused=True)
    left = {}
    for step, batch in enumerate(BATCHES):
        optimizer.zero_grad()
        inputs, targets = map(torch.tensor, batch)
        if parallel:
            inputs, targets = (by_rows(values, mesh, 0) for values in (inputs, targets))
        loss = (model(inputs) - targets).sum()
        loss.backward()
        total = loss.detach()
        left[f"step {step} loss"] = full(total)
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
        difference = (actual[name] - values).abs().max()
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{name}: max difference {float(difference)}")
        code |= not float(difference) <= TOLERANCE
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
