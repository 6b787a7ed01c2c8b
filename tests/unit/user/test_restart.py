"""`resume=`: ranks that start again from a checkpoint agree with one device, or the verdict names the state that was lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from equivcheck import Outcome, Restart, UsageError, check_training
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ElementType, MixedPrecision
from equivcheck.user.diagnosis.restarted import NOTHING_LOST
from equivcheck.user.messages.notes import FAILED_AFTER, FAILED_BEFORE
from equivcheck.worlds.trace.differences import Phase
from unit.user.programs import adam, batches, brought, in_ddp

STEPS, AFTER = 4, 2
FILE = "checkpoint.pt"


class Counting(nn.Module):
    """A model whose outputs depend on a buffer that a state dict does not contain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Count the calls."""
        self.count = self.count + 1
        outputs: torch.Tensor = self.last(torch.tanh(self.first(inputs))) / self.count
        return outputs


def build() -> nn.Module:
    """Two layers with names for a tensor-parallel plan."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule whose next value depends on its step count."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch)


def save(model: nn.Module, optimizer: Any, scheduler: Any, folder: Path) -> None:
    """Save everything on rank 0."""
    if dist.get_rank() == 0:
        torch.save([each.state_dict() for each in (model.module, optimizer, scheduler)], folder / FILE)


def load(  # noqa: PLR0913 - the arguments of `load`, and its mistakes
    model: nn.Module, optimizer: Any, scheduler: Any, folder: Path, *, without: str = "", ranks: tuple[int, ...] = (0, 1)
) -> None:
    """Load on some ranks, perhaps without a part."""
    if dist.get_rank() not in ranks:
        return
    state = dict(zip(("model", "optimizer", "scheduler"), torch.load(folder / FILE), strict=True))
    weights = {key: value for key, value in state["model"].items() if key != without}
    if without != "model":
        model.module.load_state_dict(weights, strict=False)
    if without != "optimizer":
        optimizer.load_state_dict(state["optimizer"])
    if without != "scheduler":
        scheduler.load_state_dict(state["scheduler"])
    if without == "step":
        for each in optimizer.state.values():
            each["step"].zero_()


def _state(model: nn.Module, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state, "scheduler": scheduler}


def save_shards(model: nn.Module, optimizer: Any, scheduler: Any, folder: Path) -> None:
    """Save with torch.distributed.checkpoint."""
    state_dict_saver.save(_state(model, optimizer, scheduler), checkpoint_id=folder)


def load_shards(model: nn.Module, optimizer: Any, scheduler: Any, folder: Path) -> None:
    """Load a checkpoint that another layout may have saved."""
    state = _state(model, optimizer, scheduler)
    state_dict_loader.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 on the model."""
    fully_shard(model, mesh=mesh["dp"])


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism."""
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def restarted(**changes: Any) -> dict[str, Any]:
    """A training under DDP with a checkpoint; `changes` may change both."""
    own = {key: changes.pop(key) for key in ("after", "save", "load") if key in changes}
    second = {key: changes.pop(f"then_{key}") for key in ("parallelize", "mesh", "data_axes") if f"then_{key}" in changes}
    resume = Restart(**{"after": AFTER, "save": save, "load": load} | own | second)
    return brought(model=build, batches=batches(4, STEPS), scheduler=decaying, resume=resume) | changes


BY_SHARDS = {"parallelize": sharded, "save": save_shards, "load": load_shards}
RIGHT: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp after the first step": {"after": 1},
    "ddp before the last step": {"after": STEPS - 1},
    "fsdp2": BY_SHARDS,
    "fsdp2, then tensor parallelism": BY_SHARDS | {"then_parallelize": split, "then_mesh": {"tp": 2}},
    "tensor parallelism, then fsdp2 on more ranks": BY_SHARDS
    | {"parallelize": split, "mesh": {"tp": 2}, "then_parallelize": sharded, "then_mesh": {"dp": 4}},
    "fsdp2, then other axis names": BY_SHARDS
    | {"then_mesh": {"x": 2}, "then_data_axes": ("x",), "then_parallelize": lambda model, mesh: sharded(model, {"dp": mesh})},
    "a sum": {"reduction": "sum", "loss": lambda outputs, targets: (outputs - targets).pow(2).sum()},
}


@pytest.mark.parametrize("changes", RIGHT.values(), ids=RIGHT)
def test_a_correct_restart_is_equivalent(changes: dict[str, Any]) -> None:
    """Ranks go on under the same layout, another one, or with another number of ranks."""
    verdict = check_training(**restarted(**changes))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
    assert verdict.measures is not None
    assert verdict.measures.norm_ratio == pytest.approx(1.0)


def test_processes_share_the_folder() -> None:
    """Ranks in gloo are processes."""
    check_training(**restarted(world="gloo", **BY_SHARDS)).assert_equivalent()


SOME = "`0.weight`, `0.bias` and 2 more"
LOST: dict[str, tuple[int, Phase, str]] = {
    "model": (AFTER, Phase.LOSS, f"does not restore parameters {SOME}"),
    "2.bias": (AFTER, Phase.LOSS, "does not restore parameter `2.bias`"),
    "optimizer": (AFTER, Phase.UPDATE, f"does not restore the optimizer's step, exp_avg and exp_avg_sq of {SOME}"),
    "step": (AFTER, Phase.UPDATE, f"does not restore the optimizer's step of {SOME}"),
    "scheduler": (AFTER + 1, Phase.UPDATE, f"does not restore the scheduler's last_epoch (0 instead of {AFTER})"),
}


@pytest.mark.usefixtures("with_causes")
@pytest.mark.parametrize("lost", LOST)
def test_what_a_checkpoint_loses_is_named(lost: str) -> None:
    """One device that continues without it has the ranks' values."""
    verdict = check_training(**restarted(load=partial(load, without=lost)))
    step, phase, words = LOST[lost]
    assert verdict.divergence is not None, verdict.describe()
    assert (verdict.divergence.step, verdict.divergence.phase) == (step, phase)
    assert verdict.kinds == (Cause.NOT_RESTORED,), verdict.describe()
    assert words in verdict.cause


def load_sharded_model(model: nn.Module, _optimizer: Any, scheduler: Any, folder: Path) -> None:
    """Load shards, but no optimizer state."""
    state = {"model": model.state_dict(), "scheduler": scheduler}
    state_dict_loader.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])


@pytest.mark.usefixtures("with_causes")
def test_ranks_without_elements_lose_nothing() -> None:
    """Two of four ranks hold no element of the last bias."""
    verdict = check_training(**restarted(**BY_SHARDS | {"load": load_sharded_model, "mesh": {"dp": 4}}))
    assert verdict.kinds == (Cause.NOT_RESTORED,), verdict.describe()
    assert f"the optimizer's step, exp_avg and exp_avg_sq of {SOME}" in verdict.cause


@pytest.mark.usefixtures("with_causes")
def test_a_buffer_outside_the_state_dict_is_lost() -> None:
    """A buffer that is not persistent starts again."""
    verdict = check_training(**restarted(model=Counting))
    assert verdict.kinds == (Cause.NOT_RESTORED,), verdict.describe()
    assert verdict.cause.endswith("does not restore buffer `count`")


@pytest.mark.usefixtures("with_causes")
def test_ranks_that_load_nothing_are_named() -> None:
    """A load on rank 0 only is enough before wrapping in DDP, which broadcasts, but not after."""
    verdict = check_training(**restarted(load=partial(load, ranks=(0,))))
    assert (verdict.outcome, verdict.cause) == (Outcome.DIVERGED, ""), verdict.describe()
    assert "on rank 1, some state differs" in verdict.hint
    assert f"parameters {SOME}; the optimizer's" in verdict.hint


@pytest.mark.usefixtures("with_causes")
def test_a_loss_does_not_explain_another_mistake() -> None:
    """If gradients are not reduced after the checkpoint either, the lost state is no cause."""
    arguments = restarted(load=partial(load, without="scheduler"), then_parallelize=unreduced)
    verdict = check_training(**arguments)
    assert (verdict.outcome, verdict.cause) == (Outcome.DIVERGED, ""), verdict.describe()
    assert "some state differs" in verdict.hint


def unreduced(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Wrap the model and reduce nothing."""
    return Wrapper(model)


class Wrapper(nn.Module):
    """Calls a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Call it."""
        outputs: torch.Tensor = self.module(inputs)
        return outputs


@pytest.mark.usefixtures("with_causes")
def test_a_mistake_after_a_correct_restart_is_no_fault_of_the_checkpoint() -> None:
    """The hint rules the checkpoint out."""
    verdict = check_training(**restarted(then_parallelize=unreduced))
    assert (verdict.cause, verdict.hint) == ("", NOTHING_LOST), verdict.describe()
    assert verdict.divergence is not None
    assert verdict.divergence.step == AFTER


@pytest.mark.usefixtures("with_causes")
def test_a_mistake_before_the_checkpoint_has_its_usual_cause() -> None:
    """The first part is diagnosed like a training without a checkpoint."""
    verdict = check_training(**restarted(parallelize=unreduced, then_parallelize=in_ddp))
    assert verdict.kinds == (Cause.NOT_REDUCED,), verdict.describe()


def failing(*_: Any) -> None:
    """Fail on every rank."""
    raise KeyError("optimizer")


@pytest.mark.parametrize(("which", "note"), [("save", FAILED_BEFORE), ("load", FAILED_AFTER)])
def test_a_failure_tells_its_part(which: str, note: str) -> None:
    """An exception in the user's function is a verdict."""
    verdict = check_training(**restarted(**{which: failing}))
    assert verdict.outcome is Outcome.CRASHED
    assert note in verdict.notes


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no Restart": ({"resume": 2}, "resume 2 is not valid: it is not a Restart"),
    "after 0": ({"after": 0}, "resume.after 0 is not valid"),
    "after the last step": ({"after": STEPS}, f"Expected a number from 1 to {STEPS - 1}, because there are {STEPS} batches"),
    "one step": ({"batches": batches(4, 1), "after": 1}, "Expected two batches or more"),
    "save": ({"save": None}, "resume.save None is not valid: it is not callable"),
    "parallelize": ({"then_parallelize": 3}, "resume.parallelize 3 is not valid"),
    "mesh": ({"then_mesh": {}}, "mesh {} is not valid"),
    "axis": ({"then_mesh": {"x": 2}}, "mesh axis 'x' without data_axes is not valid"),
    "data axes": ({"then_data_axes": ("dp",)}, "resume.data_axes without resume.mesh is not valid"),
    "rows": ({"then_mesh": {"dp": 3}}, "3"),
    "masks": ({"dropout_masks": True}, "dropout_masks with resume is not valid"),
    "cuts": ({"cuts": {"*": ((0, "dp"),)}, "then_mesh": {"dp": 4}}, "cuts with resume.mesh is not valid"),
    "precision": (
        {"precision": MixedPrecision(reduce=ElementType.BFLOAT16), "then_mesh": {"dp": 4}},
        "precision with resume.mesh or resume.parallelize is not valid",
    ),
}


@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG)
def test_invalid_arguments_are_named(changes: dict[str, Any], words: str) -> None:
    """The error names the field."""
    with pytest.raises(UsageError) as error:
        check_training(**restarted(**changes))
    assert words in str(error.value)


def test_optimizers_are_new_after_a_restart() -> None:
    """Each part calls `optimizer` on each rank, and one device only once per run."""
    seen: list[int] = []

    def counted(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        seen.append(dist.is_initialized())
        return adam(parameters)

    check_training(**restarted(optimizer=counted)).assert_equivalent()
    assert sum(seen) == 4
