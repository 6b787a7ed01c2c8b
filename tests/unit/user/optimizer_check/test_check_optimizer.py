"""A distributed optimizer that is right agrees with its reference. A wrong one does not, and its cause is named."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from equivcheck import Outcome, UsageError, check_optimizer
from equivcheck.user.optimizer_check.cases import Placed, drawn_cases
from unit.user.optimizer_check.muon import Muon

Named = list[tuple[str, nn.Parameter]]


def reference(named_parameters: Named) -> Muon:
    """Muon on one device."""
    return Muon(named_parameters)


def with_mistake(**mistake: Any) -> Any:
    """Muon with a mistake on ranks."""

    def optimizer(named_parameters: Named) -> Muon:
        return Muon(named_parameters, **mistake)

    return optimizer


def test_a_right_optimizer_is_equivalent() -> None:
    """Sharded along both dims and replicated, with checkpoints in half of the cases."""
    verdict = check_optimizer(reference, mesh={"dp": 2}, cases=6)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert {result.case.placed.value for result in verdict.results} == {"replicated", "fsdp2", "dim 1"}
    assert any(result.case.saved_after for result in verdict.results)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_optimizers_of_torch_are_equivalent(optimizer: Any) -> None:
    """On three ranks, where some shards are empty."""
    verdict = check_optimizer(optimizer, mesh={"dp": 3}, cases=6)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


def forget(module: nn.Module, _optimizer: Any, _scheduler: Any, folder: Path) -> None:
    """Save the parameters without the optimizer's state."""
    torch.save(module.state_dict(), folder / f"{dist.get_rank()}.pt")


def load_parameters(module: nn.Module, _optimizer: Any, _scheduler: Any, folder: Path) -> None:
    """Load the parameters."""
    module.load_state_dict(torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False))


SHARDS = {"placements": ("fsdp2",)}
MISTAKES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "each shard by itself": (with_mistake(gathers=False), SHARDS, "each rank optimizes its shard along dp as if it were"),
    "each part of rows by itself": (
        with_mistake(gathers=False),
        {"placements": ("dim 1",)},
        "each rank optimizes its shard along dp as if it were the full parameter",
    ),
    "scale of a shard": (
        with_mistake(scales_by_shard=True),
        SHARDS | {"shapes": {"up.weight": (6, 3)}},
        "the update of `up.weight` is multiplied by 0.707107",
    ),
    "fused as one": (
        with_mistake(splits_fused=False),
        {"shapes": {"qkv.weight": (12, 4)}},
        "`qkv.weight` is optimized as one matrix",
    ),
    "vectors decayed": (
        with_mistake(decays_vectors=True),
        {"shapes": {"weight": (4, 3), "bias": (4,)}},
        "all parameters have weight decay",
    ),
    "not decayed": (with_mistake(decay=0.0), {}, "no parameter has weight decay"),
    "vectors skipped": (
        with_mistake(skips=lambda name, _: name == "bias"),
        {"shapes": {"weight": (4, 3), "bias": (4,)}},
        "`bias` is not updated",
    ),
    "one owner": (
        with_mistake(skips=lambda _name, parameter: parameter.dim() == 2 and dist.is_initialized() and dist.get_rank() == 1),
        {"placements": ("replicated",), "shapes": {"weight": (4, 3), "bias": (4,)}},
        "ranks have different values of `weight` after the update",
    ),
    "summed": (with_mistake(factor=2.0), {"shapes": {"bias": (4,)}}, "gradients are multiplied by 2, the number of ranks"),
    "updated twice": (with_mistake(times=2), {}, "each step updates twice"),
    "state lost": (
        reference,
        {"save": forget, "load": load_parameters, "cases": 2},
        "the optimizer's state is lost when it is loaded",
    ),
    "divided": (with_mistake(factor=0.5), {"shapes": {"bias": (4,)}}, "gradients are divided by 2, the number of ranks"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_optimizer_diverges_with_its_cause(name: str) -> None:
    """The case is shrunk first."""
    optimizer, arguments, cause = MISTAKES[name]
    verdict = check_optimizer(optimizer, reference, mesh={"dp": 2}, **({"cases": 1} | arguments))
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert verdict.cause.startswith(cause), verdict
    assert verdict.case is not None
    assert len(verdict.case.shapes) == 1
    assert f"case:  {verdict.case.placed.value}: " in str(verdict)


class Summed(torch.optim.Optimizer):
    """SGD. Mistake: gradients are summed over ranks, not averaged."""

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:
        """Multiply equal gradients by the number of ranks."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * (group["lr"] * (dist.get_world_size() if dist.is_initialized() else 1)))


def test_mistakes_with_the_same_values_are_all_named() -> None:
    """Without momentum, two updates are one with doubled gradients."""
    verdict = check_optimizer(lambda parameters: Summed(parameters, {"lr": 0.1}), mesh={"dp": 2}, cases=1)
    assert verdict.cause == "each step updates twice, or gradients are multiplied by 2, the number of ranks"


def test_the_users_function_gets_parameters_that_fsdp_takes() -> None:
    """None is without dims. The case names the function, and not a placement."""
    verdict = check_optimizer(
        partial(torch.optim.SGD, lr=0.1), mesh={"dp": 2}, parallelize=lambda model, mesh: fully_shard(model, mesh=mesh)
    )
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert {result.case.placed.value for result in verdict.results} == {"your parallelize"}


@pytest.mark.parametrize("num", [1, 2, 3])
def test_each_placement_has_cases_with_and_without_a_checkpoint(num: int) -> None:
    """For any number of placements."""
    cases = drawn_cases(12, [*Placed][:num], 4, 0)
    found = {(case.placed, case.saved_after is None) for case in cases}
    assert len(found) == 2 * num


def test_an_unknown_mistake_has_no_cause() -> None:
    """Rather none than a wrong one."""

    def noisy(named_parameters: Named) -> torch.optim.Optimizer:
        found = Muon(named_parameters)
        found.register_step_post_hook(lambda *_: named_parameters[0][1].data.add_(1e-3))
        return found

    verdict = check_optimizer(noisy, reference, mesh={"dp": 2}, cases=1, placements=("replicated",))
    assert (verdict.outcome, verdict.cause) == (Outcome.DIVERGED, "")


def test_an_optimizer_may_take_the_mesh() -> None:
    """None on one device."""
    seen = []

    def optimizer(parameters: list[nn.Parameter], mesh: Any) -> torch.optim.Optimizer:
        seen.append(None if mesh is None else tuple(mesh.mesh_dim_names))
        return torch.optim.SGD(parameters, lr=0.1)

    verdict = check_optimizer(optimizer, mesh={"dp": 2}, cases=1)
    assert verdict.outcome is Outcome.EQUIVALENT
    assert set(seen) == {None, ("dp",)}


def test_an_optimizer_that_fails_is_a_finding() -> None:
    """With the case and the error."""

    def fails(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if dist.is_initialized():
            raise RuntimeError("no such optimizer")
        return torch.optim.SGD(parameters, lr=0.1)

    verdict = check_optimizer(fails, mesh={"dp": 2}, cases=1)
    assert verdict.outcome is Outcome.CRASHED
    assert "no such optimizer" in str(verdict)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"placements": ("rows",)}, "placements ('rows',) is not valid: the placement 'rows' does not exist"),
        ({"placements": ()}, "placements () is not valid"),
        ({"cases": 0}, "cases 0 is not valid"),
        ({"steps": 0}, "steps 0 is not valid"),
        ({"save": forget}, "save without load is not valid"),
        ({"mesh": {}}, "mesh {} is not valid"),
        ({"shapes": {}}, "shapes {} is not valid: the optimizer gets no parameter"),
        ({"shapes": {"scale": ()}}, "shapes 'scale' is not valid: fully_shard refuses parameters without dims"),
        ({"optimizer": 3}, "optimizer 3 is not valid"),
    ],
)
def test_bad_input_is_one_line(arguments: dict[str, Any], words: str) -> None:
    """With the argument, its value and the allowed form."""
    given: dict[str, Any] = {"optimizer": reference, "mesh": {"dp": 2}}
    with pytest.raises(UsageError) as raised:
        check_optimizer(**given | arguments)
    assert str(raised.value).startswith(f"check_optimizer: {words}")
    assert "\n" not in str(raised.value)
