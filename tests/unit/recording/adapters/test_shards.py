"""Plain shards are put in their place in the full parameters: by Megatron's attributes, or by cuts that the user declares."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import equivcheck
from equivcheck import Outcome, TraceVerdict, UsageError
from equivcheck.recording.adapters.adapter import Adapter
from equivcheck.recording.adapters.cuts import require_declared
from equivcheck.recording.trace import Moment
from equivcheck.recording.trace_file import read_trace
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.differences import Difference
from equivcheck.worlds.trace.trace import Piece, Slot
from unit.recording.adapters.shards import train, train_on_rank

MESH = {"dp": 2, "tp": 2}
CUTS = {"embedding.weight": [(0, "tp")], "up.*": [(0, "tp", 2)], "down.weight": [(1, "tp")]}

Compared = Callable[..., TraceVerdict]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Compares ranks with one device, whose runs are recorded once."""
    one, moved = (tmp_path_factory.mktemp("trace") for _ in range(2))
    train(one)
    train(moved, moved=1)

    def compare(size: int, **options: Any) -> TraceVerdict:
        folder = tmp_path_factory.mktemp("trace")
        ranks("gloo", size).run(train_on_rank, folder, {"tensor_ranks": 2, **options})
        return equivcheck.compare(one, folder, moved=[moved])

    return compare


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"is_marked": True, "has_group": True}),
        (4, {"is_marked": True, "has_group": True}),
        (4, {"is_marked": True, "options": {"mesh": MESH}}),
        (2, {"options": {"mesh": {"tp": 2}, "cuts": CUTS}}),
        (4, {"options": {"mesh": MESH, "cuts": CUTS}}),
    ],
)
def test_right_shards_are_equivalent(compared: Compared, size: int, options: dict[str, Any]) -> None:
    """The gated part is two parts, each of them split."""
    verdict = compared(size, **options)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


@pytest.mark.parametrize(
    ("fault", "difference"),
    [("up", Difference.VALUE), ("down", Difference.VALUE), ("norm", Difference.RANKS_DISAGREE)],
)
@pytest.mark.parametrize("options", [{"is_marked": True, "has_group": True}, {"options": {"mesh": MESH, "cuts": CUTS}}])
def test_a_wrong_shard_is_found(compared: Compared, fault: str, difference: Difference, options: dict[str, Any]) -> None:
    """At its full parameter, or as a replica that differs."""
    verdict = compared(4, fault=fault, **options)
    assert verdict.outcome is Outcome.DIVERGED
    first = verdict.differences[0]
    assert (first.step, first.moment, first.tensor, first.difference) == (0, Moment.GRADIENT, f"{fault}.weight", difference)


def test_shards_without_a_position_have_another_shape(compared: Compared) -> None:
    """Nobody has said that they are shards."""
    verdict = compared(2)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "cannot be compared: shape (6, 6) in B, shape (12, 6) in A; if your ranks have parts" in verdict.reason


def learned(shape: tuple[int, ...], *, cuts: Any = None, mesh: Any = None, **attributes: Any) -> Adapter:
    """An adapter that knows one parameter."""
    parameter = nn.Parameter(torch.zeros(shape))
    for name, value in attributes.items():
        setattr(parameter, name, value)
    adapter = Adapter(require_declared(cuts, mesh), ())
    adapter.learn([], [Slot(parameter=parameter, pieces=(Piece(name="w", shape=shape),))], [])
    return adapter


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cuts": {"w": [(0, "tp")]}}, "cuts without mesh is not valid"),
        ({"mesh": {"tp": 0}}, "mesh {'tp': 0} is not valid: axis 'tp' has size 0"),
        ({"cuts": {"w": [(0, "dp")]}, "mesh": {"tp": 1}}, "cuts['w']: [(0, 'dp')] is not valid"),
        ({"cuts": {"w": [(0, "tp")]}, "mesh": {"tp": 2}}, "mesh {'tp': 2} is not valid: the job has 1 ranks"),
        ({"cuts": {"w": [(2, "tp")]}, "mesh": {"tp": 1}}, "cuts['w'] is not valid: shape (4, 3) has no dim 2"),
        (
            {"cuts": {"w": [(0, "tp", [5])]}, "mesh": {"tp": 1}},
            "the cuts entry for 'w' is not valid: its shard has shape (4, 3)",
        ),
        ({"cuts": {"w": [(0, "tp", 3)]}, "mesh": {"tp": 1}}, "cuts['w'] with components 3 is not valid"),
        ({"tensor_model_parallel": True, "partition_dim": 0}, "parameter 'w' without mesh is not valid"),
        ({"tensor_model_parallel": True, "partition_dim": 2}, "partition_dim 2 of parameter 'w' is not valid"),
        ({"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 2}, "divisible by partition_stride 2"),
    ],
)
def test_a_position_that_does_not_fit_is_refused(arguments: dict[str, Any], text: str) -> None:
    """In one line, without the name of `check_training`."""
    with pytest.raises(UsageError) as raised:
        learned((4, 3), **arguments)
    assert text in str(raised.value)
    assert not str(raised.value).startswith("check_training")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("is_expert", "start", "full"), [(False, 4, 8), (True, 8, 16)])
def test_megatron_s_groups_tell_the_position(monkeypatch: pytest.MonkeyPatch, is_expert: bool, start: int, full: int) -> None:
    """Experts have a tensor-parallel group of their own."""
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_rank=lambda: 1,
        get_tensor_model_parallel_world_size=lambda: 2,
        get_expert_tensor_parallel_rank=lambda: 2,
        get_expert_tensor_parallel_world_size=lambda: 4,
        get_expert_model_parallel_rank=lambda: 0,
        get_expert_model_parallel_world_size=lambda: 1,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)  # type: ignore[arg-type]
    adapter = learned((4, 3), tensor_model_parallel=True, partition_dim=0, allreduce=not is_expert)
    (entry,) = adapter.entries(Moment.START, [((Piece(name="w", shape=(4, 3)),), torch.ones(4, 3))])
    assert (entry.piece.shape, entry.piece.start, entry.piece.size) == ((full, 3), (start, 0), (4, 3))


def test_cuts_that_no_parameter_has_are_in_the_trace(tmp_path: Path) -> None:
    """A pipeline's ranks have other parameters each, so this is no error."""
    train(tmp_path, options={"mesh": {"tp": 1}, "cuts": {"none.*": [(0, "tp")]}})
    assert read_trace(tmp_path)[0].header.notes == ("no tensor is called none.*, which cuts or names mention",)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["e.local_experts.0.w", "e.local_experts.1.w"], ["e.local_experts.2.w", "e.local_experts.3.w"]),
        (["e.linear_fc1.weight0", "e.linear_fc1.weight1"], ["e.linear_fc1.weight2", "e.linear_fc1.weight3"]),
        (["e.weight1"], []),
    ],
)
def test_experts_get_their_numbers_in_the_full_model(
    names: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two on each of two ranks; those without a number are left out, so that no replicas are seen where there are none."""
    adapter = Adapter(require_declared(None, {"ep": 2}), ())
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    parameters = [nn.Parameter(torch.ones(2)) for _ in names]
    for parameter in parameters:
        parameter.allreduce = False  # type: ignore[attr-defined]
    pieces = [(Piece(name=name, shape=(2,)),) for name in names]
    adapter.learn([], [Slot(parameter=own, pieces=piece) for own, piece in zip(parameters, pieces, strict=True)], [])
    rows = list(zip(pieces, parameters, strict=True))
    assert [entry.piece.name for entry in adapter.entries(Moment.START, rows)] == expected
    assert len(adapter.notes) == (not expected)
