"""Two runs' names match by a map, or without a wrapper."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import equivcheck
from equivcheck import Outcome, TraceVerdict, UsageError
from equivcheck.cli import main
from equivcheck.recording.trace import Moment
from equivcheck.recording.watch.record import record
from equivcheck.worlds.trace.differences import Difference

Recorded = tuple[Path, Path]
"""A run, and the same one with moved parameters."""


class Wrapper(nn.Module):
    """Calls its model, which has another name in it."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__()
        self.own_name = name
        setattr(self, name, model)
        self.scale = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The model's output."""
        found: torch.Tensor = getattr(self, self.own_name)(inputs)
        return found


def block(names: tuple[str, str, str] = ("up", "norm", "down")) -> nn.Module:
    """Two linears and a norm."""
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)
    return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


def recorded(
    folder: Path, model: nn.Module, fault: str = "", *, change: Callable[[], None] | None = None, **options: Any
) -> Path:
    """A recorded training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with record(folder, **options):
        for step in range(2):
            optimizer.zero_grad()
            model(torch.randn(5, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            for name, parameter in model.named_parameters():
                if fault and name.endswith(fault):
                    assert parameter.grad is not None
                    parameter.grad *= 1.1
            if change is not None:
                change()
            optimizer.step()
    return folder


def recorded_twice(folder: Path, make: Callable[[], nn.Module]) -> Recorded:
    """Runs to compare with."""
    return recorded(folder / "one", make()), recorded(folder / "moved", make(), moved=1)


def compared(runs: Recorded, other: Path) -> TraceVerdict:
    """The verdict with measured noise."""
    return equivcheck.compare(runs[0], other, moved=[runs[1]])


WRAPPED: Mapping[str, tuple[nn.Module, nn.Module, str]] = {
    "in front, in one": (block(), Wrapper("engine", block()), "6 names match without 'engine.'"),
    "in front, in the other": (Wrapper("engine", block()), block(), "6 names match without 'engine.'"),
    "in front, of a common one": (
        Wrapper("layers", block()),
        Wrapper("model", Wrapper("layers", block())),
        "6 names match without 'model.'",
    ),
    "inside": (
        nn.Sequential(block(("a", "b", "c")), nn.Linear(2, 2)),
        nn.Sequential(Wrapper("inner", block(("a", "b", "c"))), nn.Linear(2, 2)),
        "6 names match without 'inner'",
    ),
    "in both": (
        Wrapper("model", block()),
        Wrapper("_forward_module", block()),
        "6 names match without '_forward_module', 'model'",
    ),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_wrappers_in_one_run_do_not_matter(tmp_path: Path, case: str) -> None:
    """A note names the removed part, and a fault is found under the first run's name."""
    one, other, note = WRAPPED[case]
    torch.manual_seed(1)
    for own, theirs in zip(one.parameters(), other.parameters(), strict=True):
        own.data.copy_(torch.randn_like(own))
        theirs.data.copy_(own)
    first, second = recorded(tmp_path / "one", one), recorded(tmp_path / "other", other)
    verdict = equivcheck.compare(first, second)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert note in str(verdict)


def test_a_fault_behind_a_wrapper_has_the_first_run_s_name(tmp_path: Path) -> None:
    """In the verdict."""
    one = recorded_twice(tmp_path, block)
    verdict = compared(one, recorded(tmp_path / "other", Wrapper("engine", block()), "down.weight"))
    assert verdict.outcome is Outcome.DIVERGED
    assert (verdict.differences[0].moment, verdict.differences[0].tensor) == (Moment.GRADIENT, "down.weight")


def test_modules_with_other_names_do_not_match(tmp_path: Path) -> None:
    """Nothing says that they are the same."""
    first, second = (recorded(tmp_path / name, Wrapper(name, nn.Linear(3, 2))) for name in ("encoder", "decoder"))
    with pytest.raises(UsageError, match=r"encoder[.]weight, the second decoder[.]weight, and no tensor is in both"):
        equivcheck.compare(first, second)


def test_a_missing_tensor_stays_missing_behind_a_wrapper(tmp_path: Path) -> None:
    """The others match."""
    other = block()
    other.get_submodule("down").bias = None
    verdict = compared(recorded_twice(tmp_path, block), recorded(tmp_path / "other", Wrapper("engine", other)))
    assert verdict.outcome is Outcome.DIVERGED
    first = verdict.differences[0]
    assert (first.moment, first.tensor, first.difference) == (Moment.START, "down.bias", Difference.MISSING)


def test_a_map_renames_tensors(tmp_path: Path) -> None:
    """When two runs are compared, or already when one is recorded."""
    names = {"fc.*": "up.*", "proj.*": "down.*"}
    one, moved = recorded_twice(tmp_path, lambda: block(("fc", "norm", "proj")))
    other = recorded(tmp_path / "other", block())
    assert equivcheck.compare(one, other).outcome is Outcome.DIVERGED
    assert equivcheck.compare(one, other, names=names).outcome is Outcome.EQUIVALENT
    again = recorded(tmp_path / "again", block(), names=names)
    assert equivcheck.compare(one, again).outcome is Outcome.EQUIVALENT
    wrong = recorded(tmp_path / "wrong", block(), "down.weight", names=names)
    assert compared((one, moved), wrong).differences[0].tensor == "proj.weight"


class Attention(nn.Module):
    """Projections of queries, keys and values, in one weight or in three; the one may be transposed, or have heads in turn."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, (q, k, v) = form, (torch.randn(8, 3), torch.randn(4, 3), torch.randn(4, 3))
        if form == "separate":
            self.q, self.k, self.v = nn.Parameter(q), nn.Parameter(k), nn.Parameter(v)
        elif form == "heads":
            self.qkv = nn.Parameter(torch.cat([*map(torch.cat, zip(q.chunk(2), k.chunk(2), v.chunk(2), strict=True))]))
        else:
            fused = torch.cat([q, k, v])
            self.qkv = nn.Parameter(fused.T.contiguous() if form == "transposed" else fused)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores with shape (rows, 8)."""
        if self.form == "separate":
            q, k, v = inputs @ self.q.T, inputs @ self.k.T, inputs @ self.v.T
        elif self.form == "heads":
            heads = [(inputs @ part.T).split([4, 2, 2], -1) for part in self.qkv.chunk(2)]
            q, k, v = (torch.cat([head[number] for head in heads], -1) for number in range(3))
        else:
            q, k, v = (inputs @ (self.qkv if self.form == "transposed" else self.qkv.T)).split([8, 4, 4], -1)
        return q * torch.cat([k, v], -1).tanh()


FUSED: Mapping[str, Mapping[str, Any]] = {
    "plain": {"parts": ["q", "k", "v"]},
    "heads": {"parts": ["q", "k", "v"], "groups": 2},
    "transposed": {"parts": ["q", "k", "v"], "dim": 1, "transpose": True},
}


@pytest.mark.parametrize("form", FUSED)
def test_fused_weights_are_compared_with_their_parts(tmp_path: Path, form: str) -> None:
    """Also heads in turn, and GPT-2's transposed weights. A fault in a part is one in the fused weight."""
    one, moved = recorded_twice(tmp_path, lambda: Attention(form))
    other = recorded(tmp_path / "other", Attention("separate"), names={"qkv": FUSED[form]})
    verdict = equivcheck.compare(one, other)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    wrong = recorded(tmp_path / "wrong", Attention("separate"), "v", names={"qkv": FUSED[form]})
    verdict = compared((one, moved), wrong)
    assert verdict.outcome is Outcome.DIVERGED
    assert (verdict.differences[0].moment, verdict.differences[0].tensor) == (Moment.GRADIENT, "qkv")
    other_order = recorded(tmp_path / "order", Attention("separate"), names={"qkv": {**FUSED[form], "parts": ["q", "v", "k"]}})
    verdict = equivcheck.compare(one, other_order)
    assert verdict.outcome is Outcome.DIVERGED
    assert (verdict.differences[0].moment, verdict.differences[0].tensor) == (Moment.START, "qkv")


class Tied(nn.Module):
    """An embedding whose weight is also that of the output, as one parameter or as two."""

    def __init__(self, *, is_one: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.head.weight = self.embedding.weight if is_one else nn.Parameter(self.embedding.weight.detach().clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores with shape (rows, 3)."""
        scores: torch.Tensor = self.head(self.embedding(inputs).tanh())
        return scores

    def add_gradients(self) -> None:
        """Give both weights the sum of their gradients, as the ends of a pipeline do."""
        one, other = self.embedding.weight, self.head.weight
        assert one.grad is not None
        assert other.grad is not None
        one.grad += other.grad
        other.grad.copy_(one.grad)


@pytest.mark.parametrize("is_right", [True, False])
def test_tied_weights_are_replicas_of_one(tmp_path: Path, is_right: bool) -> None:
    """If they have the gradient of one."""
    one = recorded_twice(tmp_path, lambda: Tied(is_one=True))
    names = {"embedding.weight": {"tied": ["embedding.weight", "head.weight"]}}
    model = Tied(is_one=False)
    change = model.add_gradients if is_right else None
    verdict = compared(one, recorded(tmp_path / "other", model, names=names, change=change))
    assert verdict.outcome is (Outcome.EQUIVALENT if is_right else Outcome.DIVERGED), verdict
    if not is_right:
        assert (verdict.differences[0].moment, verdict.differences[0].tensor) == (Moment.GRADIENT, "embedding.weight")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"up.weight": "none"}, "the names entry with 'none' is not valid: the second run has no such tensor"),
        ({"none": "up.weight"}, "the first run has no tensor 'none'"),
        ({"up.weight": "down.weight"}, "'up.weight' and 'down.weight' would both be 'up.weight'"),
        ({"up.weight": "down.weight", "down.weight": "up.weight"}, "its shape is (4, 3), and 'down.weight' has (2, 4)"),
        ({"up.weight": {"parts": ["up.weight", "down.weight"]}}, "not valid for compare"),
        ({"up.weight": {"name": "up.weight", "transpose": True}}, "not valid for compare"),
    ],
)
def test_a_map_that_does_not_fit_the_runs_is_refused(tmp_path: Path, names: Any, text: str) -> None:
    """In one line."""
    one, other = (recorded(tmp_path / name, block()) for name in ("one", "other"))
    with pytest.raises(UsageError) as raised:
        equivcheck.compare(one, other, names=names)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_command_takes_a_file(tmp_path: Path) -> None:
    """A file that is not valid ends with exit code 2."""
    one = recorded(tmp_path / "one", block(("fc", "norm", "proj")))
    other = recorded(tmp_path / "other", block())
    (tmp_path / "map.toml").write_text('"fc.*" = "up.*"\n"proj.*" = "down.*"\n')
    arguments = ["compare", str(one), str(other), "--names"]
    assert CliRunner().invoke(main, [*arguments, str(tmp_path / "map.toml")]).exit_code == 0
    (tmp_path / "bad.toml").write_text("fc.weight = 'up.weight'\n")
    for name in ("bad.toml", "none.toml"):
        result = CliRunner().invoke(main, [*arguments, str(tmp_path / name)])
        assert result.exit_code == 2
