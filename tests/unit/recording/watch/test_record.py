"""Recorded runs are compared whatever their layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import equivcheck
from equivcheck import Outcome, TraceVerdict, UsageError
from equivcheck.cli import main
from equivcheck.recording.compare.judge import CLUES
from equivcheck.recording.compare.runs import read_run
from equivcheck.recording.trace import Moment
from equivcheck.recording.trace_file import read_trace
from equivcheck.recording.watch.record import record
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.differences import Difference
from unit.recording.trainings import train, train_on_rank

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

Recorded = Callable[..., Path]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Recorded runs, each made once."""
    runs: dict[tuple[object, ...], Path] = {}

    def run(layout: str = "", fault: str = "", *, size: int = 1, moved: int = 0) -> Path:
        key = (layout, fault, size, moved)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("trace")
            if size == 1:
                train(runs[key], layout, fault, moved)
            else:
                ranks("gloo", size).run(train_on_rank, runs[key], layout, fault)
        return runs[key]

    return run


def compared(recorded: Recorded, other: Path, layout: str = "") -> TraceVerdict:
    """The other run against one device, with measured noise."""
    return equivcheck.compare(recorded(layout), other, moved=[recorded(layout, moved=1)])


@pytest.mark.parametrize(("layout", "size"), [("", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp2", 2), ("fsdp2", 3)])
def test_a_right_layout_is_equivalent(recorded: Recorded, layout: str, size: int) -> None:
    """Initial parameters, gradients before and after clipping, updates, state and buffers are compared."""
    verdict = compared(recorded, recorded(layout, size=size))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    for moment in (Moment.START, Moment.LOSS, Moment.UNCLIPPED, Moment.GRADIENT, Moment.UPDATE, Moment.STATE, Moment.BUFFER):
        assert f"{moment.value}," in verdict.coverage[0] or f"{moment.value};" in verdict.coverage[0]


def test_shards_along_two_dims_are_equivalent(recorded: Recorded) -> None:
    """Tensor parallelism."""
    verdict = compared(recorded, recorded("tensor_parallel", size=2), "plain")
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


def test_two_parallel_runs_are_compared(recorded: Recorded) -> None:
    """Neither needs a single device, nor the same number of ranks."""
    verdict = equivcheck.compare(recorded("fsdp2", size=3), recorded("ddp", size=2), moved=[recorded(moved=1)])
    assert verdict.outcome is Outcome.EQUIVALENT, verdict


@pytest.mark.parametrize(
    ("layout", "fault", "step", "moment", "tensor", "difference"),
    [
        ("ddp", "not averaged", 0, Moment.UNCLIPPED, "embedding.weight", Difference.VALUE),
        ("ddp", "same rows", 0, Moment.UNCLIPPED, "embedding.weight", Difference.VALUE),
        ("fsdp2", "gradient", 1, Moment.UNCLIPPED, "embedding.weight", Difference.VALUE),
        ("fsdp1", "not clipped", 0, Moment.GRADIENT, "embedding.weight", Difference.VALUE),
        ("ddp", "learning rate", 0, Moment.UPDATE, "embedding.weight", Difference.VALUE),
        ("ddp", "replica", 1, Moment.UPDATE, "embedding.weight", Difference.RANKS_DISAGREE),
    ],
)
def test_a_wrong_training_diverges_at_its_first_wrong_tensor(  # noqa: PLR0913, PLR0917 - columns of the table
    recorded: Recorded, layout: str, fault: str, step: int, moment: Moment, tensor: str, difference: Difference
) -> None:
    """With the step, the moment and the name."""
    verdict = compared(recorded, recorded(layout, fault, size=2))
    assert verdict.outcome is Outcome.DIVERGED
    first = next(each for each in verdict.differences if each.moment not in CLUES)
    assert (first.step, first.moment, first.tensor, first.difference) == (step, moment, tensor, difference)


def test_without_measured_noise_only_large_first_gradients_are_certain(recorded: Recorded) -> None:
    """A later difference of values may be rounding, for all that is known."""
    assert equivcheck.compare(recorded(), recorded("ddp", "not averaged", size=2)).outcome is Outcome.DIVERGED
    verdict = equivcheck.compare(recorded(), recorded("fsdp2", "gradient", size=2))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "--moved" in verdict.hint


def test_runs_that_end_at_other_steps_are_compared_where_both_have_values(tmp_path: Path) -> None:
    """State and buffers are read after the last step only, so they are compared only if that is the same."""
    for name, steps in (("one", 3), ("other", 2)):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        with record(tmp_path / name, steps=steps):
            for _ in range(3):
                step(model, optimizer)
    verdict = equivcheck.compare(tmp_path / "one", tmp_path / "other")
    assert verdict.outcome is Outcome.EQUIVALENT
    assert "10 tensors in steps 0 to 1" in verdict.coverage[0]
    assert "not compared: step 2, only in A" in verdict.coverage


def test_an_update_that_is_missing_at_the_end_is_a_gap(tmp_path: Path) -> None:
    """The other run has a step more, and this one ran its backward pass."""
    for name, num_updates in (("one", 3), ("other", 2)):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        with record(tmp_path / name):
            for _ in range(num_updates):
                step(model, optimizer)
            if num_updates == 2:
                model(torch.ones(4, 3)).sum().backward()
    for pair in (("one", "other"), ("other", "one")):
        verdict = equivcheck.compare(*(tmp_path / name for name in pair))
        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert "1 backward pass of" in verdict.reason
        assert "after step 1 led to no update" in verdict.reason


class WithCounts(nn.Module):
    """A linear, a batch norm with its integer buffer, a mask, and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.ones(80, 80, dtype=torch.bool))
        self.register_buffer("rotations", torch.polar(torch.ones(3), torch.arange(3.0)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores with shape (rows, 2)."""
        scores: torch.Tensor = self.norm(self.linear(inputs))
        return scores


def recorded_with_counts(folder: Path, *, counts: int = 0, scale: float = 1.0) -> Path:
    """A recorded training whose batch norm has counted before, or whose loss is scaled."""
    torch.manual_seed(0)
    model = WithCounts()
    assert model.norm.num_batches_tracked is not None
    model.norm.num_batches_tracked += counts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(folder):
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.arange(12.0).reshape(4, 3)).square().sum() * scale).backward()
            optimizer.step()
    return folder


def test_integers_are_compared_exactly(tmp_path: Path) -> None:
    """No rounding explains another count, also without measured noise."""
    one = recorded_with_counts(tmp_path / "one")
    assert equivcheck.compare(one, recorded_with_counts(tmp_path / "same")).outcome is Outcome.EQUIVALENT
    verdict = equivcheck.compare(one, recorded_with_counts(tmp_path / "other", counts=1))
    assert verdict.outcome is Outcome.DIVERGED
    assert [each.tensor for each in verdict.differences] == ["norm.num_batches_tracked"]


def test_buffers_are_compared_unless_complex(tmp_path: Path) -> None:
    """Masks as well, and no large integer hides a difference in another buffer."""
    entries = read_trace(recorded_with_counts(tmp_path / "one"))[0].steps[-1].entries
    buffers = {entry.piece.name for entry in entries if entry.moment is Moment.BUFFER}
    assert buffers == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "mask"}
    counts = 10**9
    first, second = (read_run(recorded_with_counts(tmp_path / f"{each}", counts=each)) for each in (0, counts))
    step = first.steps[-1]
    assert first.norms[step, Moment.BUFFER] == second.norms[step, Moment.BUFFER]


def test_nan_in_one_run_is_a_difference_and_in_both_is_undecided(tmp_path: Path) -> None:
    """NaN is no evidence for equality."""
    one, bad = recorded_with_counts(tmp_path / "one"), recorded_with_counts(tmp_path / "bad", scale=float("nan"))
    verdict = equivcheck.compare(one, bad)
    assert verdict.outcome is Outcome.DIVERGED
    first = next(each for each in verdict.differences if each.moment not in CLUES)
    assert str(first) == "step 0 gradient linear.weight: B has NaN or infinite values"
    verdict = equivcheck.compare(bad, recorded_with_counts(tmp_path / "worse", scale=float("nan")))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.reason == "at step 0, 4 of 4 gradients cannot be compared: both runs have NaN or infinite values"


def recorded_pair(folder: Path, *, rate: float = 0.1, moved: int = 0) -> Path:
    """A recorded training with two models of one kind, and an optimizer for each."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 3), nn.Linear(3, 3)]
    optimizers = [torch.optim.SGD(models[0].parameters(), lr=0.1), torch.optim.SGD(models[1].parameters(), lr=rate)]
    with record(folder, moved=moved):
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
                models[1](models[0](torch.ones(4, 3))).square().sum().backward()
                optimizer.step()
    return folder


def test_models_side_by_side_have_names_of_their_own(tmp_path: Path) -> None:
    """As those of a GAN: the second one has a prefix."""
    one = recorded_pair(tmp_path / "one")
    assert equivcheck.compare(one, recorded_pair(tmp_path / "same")).outcome is Outcome.EQUIVALENT
    moved = recorded_pair(tmp_path / "moved", moved=1)
    verdict = equivcheck.compare(one, recorded_pair(tmp_path / "other", rate=0.2), moved=[moved])
    assert verdict.outcome is Outcome.DIVERGED
    assert str(verdict.differences[0]).startswith("step 1 parameter module1.weight: ")


def test_what_else_differs_is_said(recorded: Recorded, tmp_path: Path) -> None:
    """Environments, steps that not all ranks have, and files that end in the middle of a step."""
    for file in recorded("ddp", size=2).iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace('"python":"', '"python":"9'))
    last = tmp_path / "rank1.ecr"
    lines = last.read_text().split("\n")
    last.write_text("\n".join(lines[:3]) + "\n" + lines[3][:100])
    with pytest.raises(UsageError, match="rank 1 ends in the middle of a step, after 2 complete steps") as raised:
        compared(recorded, tmp_path)
    assert "--steps 2" in str(raised.value)
    verdict = equivcheck.compare(recorded(), tmp_path, moved=[recorded(moved=1)], steps=2)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert any(note.startswith("python is 9") for note in verdict.notes)


def test_partial_tensors_are_not_taken_for_replicas(recorded: Recorded, tmp_path: Path) -> None:
    """They are left out, and the verdict says so."""
    for file in recorded("ddp", size=2).iterdir():
        old, new = '"name":"up.bias"', '"addends":[],"name":"up.bias"'
        (tmp_path / file.name).write_text(file.read_text().replace(old, new))
    verdict = compared(recorded, tmp_path)
    assert verdict.outcome is Outcome.EQUIVALENT
    assert "not compared: 10 tensors with partial placements" in verdict.coverage


def small() -> tuple[nn.Linear, torch.optim.SGD]:
    """A model and its optimizer."""
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()


def test_chosen_steps_are_recorded(tmp_path: Path) -> None:
    """Counted from 0. The step before the first one has the parameters with which the recording begins."""
    model, optimizer = small()
    with record(tmp_path, steps=2, from_step=1):
        for _ in range(5):
            step(model, optimizer)
    (trace,) = read_trace(tmp_path)
    assert [each.step for each in trace.steps] == [0, 1, 2]
    found = [{entry.moment for entry in each.entries} for each in trace.steps]
    assert found == [{Moment.UPDATE}, *[{Moment.GRADIENT, Moment.UPDATE}] * 2]


def test_several_optimizers_step_in_one_step(tmp_path: Path) -> None:
    """A step ends when the model is called again."""
    model = nn.Linear(3, 2)
    optimizers = [torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in model.parameters()]
    with record(tmp_path):
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    (trace,) = read_trace(tmp_path)
    gradients = [[entry.piece.name for entry in each.entries if entry.moment is Moment.GRADIENT] for each in trace.steps]
    assert gradients == [["weight", "bias"]] * 2
    assert {entry.piece.name for entry in trace.steps[-1].entries if entry.moment is Moment.STATE} == {
        "weight/momentum_buffer",
        "bias/momentum_buffer",
    }


def test_an_optimizer_inside_backward_is_recorded(tmp_path: Path) -> None:
    """Gradients are read when the optimizer finds them."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)

        def update(parameter: torch.Tensor, own: torch.optim.SGD = own) -> None:
            own.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(update)
    with record(tmp_path):
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
    (trace,) = read_trace(tmp_path)
    for each in trace.steps:
        assert sorted(entry.piece.name for entry in each.entries if entry.moment is Moment.GRADIENT) == ["bias", "weight"]


def test_a_compiled_model_is_recorded_under_its_own_names(tmp_path: Path) -> None:
    """The hooks are not traced into its graph."""
    model, optimizer = small()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with record(tmp_path):
        step(compiled, optimizer)
    (trace,) = read_trace(tmp_path)
    assert {entry.piece.name for entry in trace.steps[0].entries} == {"weight", "bias"}


def test_a_recording_that_fails_leaves_the_training_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says so, and the hooks are removed."""
    (tmp_path / "file").write_text("")
    model, optimizer = small()
    before = model.weight.detach().clone()
    with record(tmp_path / "file"):
        for _ in range(3):
            step(model, optimizer)
    assert not torch.equal(before, model.weight)
    assert capsys.readouterr().err.count("equivcheck: recording ended at step 0: ") == 1


def test_only_one_recording_runs_at_a_time(tmp_path: Path) -> None:
    """The second one is refused, and the first one goes on."""
    model, optimizer = small()
    with record(tmp_path):
        with pytest.raises(UsageError, match="already records"), record(tmp_path / "other"):
            pass
        step(model, optimizer)
    assert len(read_trace(tmp_path)[0].steps) == 1
    with record(tmp_path / "next"):
        step(model, optimizer)


@pytest.mark.parametrize(("argument", "value"), [("steps", 0), ("from_step", -1), ("moved", 33), ("moved", -1)])
def test_a_wrong_argument_is_named(tmp_path: Path, argument: str, value: int) -> None:
    """With its value."""
    with pytest.raises(UsageError, match=f"{argument} {value} is not valid"), record(tmp_path, **{argument: value}):  # type: ignore[arg-type]
        pass


SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(3, 2)
if "swapped" in sys.argv:
    model.weight.data = model.weight.data.flip(0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
sys.exit(int(sys.argv[1]))
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "equivcheck", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_script_is_recorded_as_it_is(tmp_path: Path) -> None:
    """Its exit code is kept, and two recordings of it are compared. A used folder and an unknown program are bad input."""
    (script := tmp_path / "train.py").write_text(SCRIPT)
    for name, *options in (("one", "0"), ("other", "7", "swapped")):
        ran = run("record", "-o", tmp_path / name, "--", sys.executable, "-Wignore::SyntaxWarning", script, *options)
        assert ran.returncode == int(options[0]), ran.stderr
    result = CliRunner().invoke(
        main, ["compare", str(tmp_path / "one"), str(tmp_path / "other"), "--json"], standalone_mode=False
    )
    found = json.loads(result.output)
    assert found["outcome"] == "diverged"
    assert (
        found["reason"] == "another start: 1 of 2 initial parameters differs; B has weight with the same numbers in other places"
    )
    again = run("record", "-o", tmp_path / "one", "--", sys.executable, script, "0")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "already has a trace" in again.stderr
    missing = run("record", "-o", tmp_path / "none", "--", "no-such-program")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "no-such-program" in missing.stderr
