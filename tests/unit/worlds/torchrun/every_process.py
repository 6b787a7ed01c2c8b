"""Script for every process of a world of two: prints its observations as a JSON object."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
from torch import nn

from equivcheck import UsageError, World, check, check_training
from equivcheck.mutants.registry import mutant
from equivcheck.worlds.failure import RanksFailed
from unit.worlds.programs import rank_and_sum
from unit.worlds.torchrun import programs

seen: dict[str, object] = {"rank": int(os.environ["RANK"])}

with World("torchrun") as world:
    seen["values"] = world.run(rank_and_sum).values
    before = programs.state()
    world.run(programs.change_state)
    seen["state is as it was"] = programs.state() == before
    verdict = check(programs.scenario(2), world=world)
    seen["equivalent"] = (verdict.outcome.value, verdict.world)
    judged = check(programs.tensor_program(2), world=world)
    seen["tensor program"] = (judged.outcome.value, judged.seconds)
seen["group has ended"] = not dist.is_initialized()

dist.init_process_group("gloo")
group = id(dist.group.WORLD)
verdict = check(programs.scenario(2), world="torchrun", alter=mutant("gradients_summed").plant)
seen["planted"] = (verdict.outcome.value, repr(verdict.divergence))
with World("torchrun", size=2) as world:
    seen["group is the script's"] = world.run(programs.group_of_rank).values[int(os.environ["RANK"])] == group
seen["group is left"] = id(dist.group.WORLD) == group

try:
    check(programs.scenario(4), world="torchrun")
except UsageError as error:
    seen["too small"] = str(error)

verdict_of_user = check_training(
    model=lambda: nn.Linear(2, 1),
    parallelize=programs.distributed,
    mesh={"dp": 2},
    batches=[(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(2)],  # others in each process
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    world=World("torchrun"),
)
seen["training of a user"] = verdict_of_user.outcome.value

failures = []
for program in (programs.raise_on_last, rank_and_sum):
    try:
        World("torchrun").run(program)
    except RanksFailed as failed:
        failures.append(str(failed))
seen["failures"] = failures
print(json.dumps(seen))
