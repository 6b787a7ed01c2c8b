"""Text of trainings that crash or hang: it shows the user's line, the module and the error, and fits on a screen."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from equivcheck import Outcome, check_training
from equivcheck.user.frames import place_lines
from equivcheck.user.messages.failure_text import MAX_LINES, failure_lines
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState
from unit.user.programs import brought, in_ddp

HERE = "test_failure_text.py"


def rank() -> int:
    """This rank, or -1 on one device."""
    return dist.get_rank() if dist.is_initialized() else -1


class Gated(nn.Module):
    """Two layers in a block, with a function that may misbehave between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(4, 6), nn.Linear(6, 4), between

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply all three."""
        return self.down(self.between(self.up(inputs)))


def model(between: Any = torch.tanh) -> nn.Module:
    """Two blocks and a head. Only the second misbehaves."""
    return nn.Sequential(Gated(torch.tanh), Gated(between), nn.Linear(4, 2))


def narrow(hidden: torch.Tensor) -> torch.Tensor:
    """Lose a feature on ranks."""
    return hidden if rank() < 0 else hidden[:, 1:]


def waits_alone(hidden: torch.Tensor) -> torch.Tensor:
    """Let all ranks but one reduce something."""
    if rank() not in (-1, 1):
        dist.all_reduce(torch.ones(3))
    return hidden


def gathers_alone(hidden: torch.Tensor) -> torch.Tensor:
    """Let rank 1 issue another collective."""
    if rank() == 1:
        dist.broadcast(torch.ones(4), src=0)
    elif rank() >= 0:
        dist.all_reduce(torch.ones(3))
    return hidden


def lines_of(**changes: Any) -> list[str]:
    """Lines about a training that fails."""
    verdict = check_training(**brought(model=model, **changes))
    assert verdict.outcome in (Outcome.CRASHED, Outcome.HUNG)
    assert all(len(line) <= 80 for line in verdict.describe().splitlines() if HERE not in line)
    return [line.strip() for line in verdict.describe().splitlines()]


def require_place(lines: list[str], function: str, code: str) -> None:
    """Check that a frame of this file is followed by its code."""
    index = next(index for index, line in enumerate(lines) if line.endswith(f", in {function}"))
    assert HERE in lines[index]
    assert lines[index + 1] == code


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_crash_in_a_forward_names_line_module_and_error(world: str) -> None:
    """All ranks fail in the same way, so they share one paragraph, and torch's frames are left out."""
    verdict = check_training(**brought(model=lambda: model(narrow)), world=world)
    lines = [line.strip() for line in verdict.describe().splitlines()]
    assert lines[1] == "ranks 0, 1 raised RuntimeError in module 1.down (Linear)"
    require_place(lines, "forward", "return self.down(self.between(self.up(inputs)))")
    assert lines[4].startswith("error: ")
    assert lines[4].endswith("mat1 and mat2 shapes cannot be multiplied (2x5 and 6x4)")
    assert "torch/nn" not in verdict.describe()
    assert "torch/nn" in verdict.describe(verbose=True)


def test_a_crash_in_the_loss_names_no_module() -> None:
    """The loss is called outside of the model. The other rank waits for the one that failed."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if rank() == 1:
            raise ValueError("label 9 is out of range\n" * 200)
        return nn.functional.mse_loss(outputs, targets)

    lines = lines_of(parallelize=in_ddp, loss=loss)
    assert lines[1] == "rank 1 raised ValueError"
    require_place(lines, "loss", 'raise ValueError("label 9 is out of range\\n" * 200)')
    assert lines.count("label 9 is out of range") == MAX_LINES - 1
    assert lines[4 + MAX_LINES] == "..."
    assert any(line.startswith("rank 0 waits in all_reduce.sum float64[") for line in lines)


def test_a_crash_in_parallelize_names_the_line() -> None:
    """A misspelled submodule is an error in the user's function."""

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> None:
        in_ddp(module.layers, mesh)

    lines = lines_of(parallelize=parallelize)
    assert lines[1] == "ranks 0, 1 raised AttributeError"
    require_place(lines, "parallelize", "in_ddp(module.layers, mesh)")
    assert lines[4] == "error: 'Sequential' object has no attribute 'layers'"


def test_a_plan_that_does_not_fit_names_the_module() -> None:
    """The error of a tensor-parallel style names neither plan nor module."""

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> None:
        parallelize_module(module, mesh, {"0.up": ColwiseParallel(), "1": ColwiseParallel()})

    lines = lines_of(parallelize=parallelize, mesh={"tp": 2})
    assert lines[1] == "ranks 0, 1 raised NotImplementedError in module 1 (Gated)"
    assert lines[2].endswith(", in parallelize")
    assert lines[3].startswith("parallelize_module(module, mesh, ")


def test_a_key_of_a_plan_that_names_no_module_is_noted() -> None:
    """The wrong name is the cause of an error elsewhere. torch only warns, on each rank."""

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> None:
        parallelize_module(module, mesh, {"0.up": ColwiseParallel(), "0.dwon": RowwiseParallel()})

    text = " ".join(lines_of(parallelize=parallelize, mesh={"tp": 2}))
    assert "raised RuntimeError in module 0.down (Linear)" in text
    assert text.count("torch skipped key 'dwon' in your plan for parallelize_module, because Gated has no submodule 'dwon'") == 1


def test_a_hang_names_collectives_and_lines() -> None:
    """Ranks that wait in the same place are said once, and a finished rank has no place."""
    verdict = check_training(
        **brought(model=lambda: model(waits_alone), parallelize=lambda module, _: None, mesh={"dp": 4}), deadline=5.0
    )
    assert verdict.outcome is Outcome.HUNG
    lines = [line.strip() for line in verdict.describe().splitlines()]
    assert lines[1] == "no rank can continue"
    assert lines[2] == "ranks 0, 2, 3 wait in all_reduce.sum float32[3] on ranks 0 to 3, call 0"
    require_place(lines, "waits_alone", "dist.all_reduce(torch.ones(3))")
    assert lines[5] == "rank 1 finished"


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_collectives_that_do_not_match_are_shown_with_their_lines(world: str) -> None:
    """Both calls, then each rank's line."""
    changes = {"model": lambda: model(gathers_alone), "parallelize": lambda module, _: None}
    verdict = check_training(**brought(**changes), world=world, deadline=5.0)
    assert verdict.outcome is Outcome.HUNG
    lines = [line.strip() for line in verdict.describe().splitlines()]
    text = " ".join(lines)
    assert "collectives do not match: rank " in text
    assert "rank 0 waits in all_reduce.sum float32[3] on ranks 0, 1, call 0" in lines
    assert "rank 1 waits in broadcast with rank 0 float32[4] on ranks 0, 1, call 0" in lines
    assert "dist.broadcast(torch.ones(4), src=0)" in lines
    assert "dist.all_reduce(torch.ones(3))" in lines


def test_the_name_stands_in_the_first_line() -> None:
    """Without a name it is "your training"."""
    assert check_training(**brought(), name="tiny").describe().startswith("EQUIVALENT: 'tiny' on dp 2, ")


def test_a_line_that_torch_logs_on_all_ranks_appears_once(caplog: pytest.LogCaptureFixture) -> None:
    """The user's own lines are not touched."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.tensor", "users")]

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for logger in loggers:
            logger.warning("from every rank")
            logger.warning("from rank %d", rank())
        return in_ddp(module, mesh)

    handler = caplog.handler
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate, _ = False, logger.setLevel(logging.WARNING)
    try:
        check_training(**brought(parallelize=parallelize))
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
    texts = [(record.name, record.getMessage()) for record in caplog.records]
    assert texts.count(("torch.distributed.tensor", "from every rank")) == 1
    assert texts.count(("users", "from every rank")) == 2
    assert {text for name, text in texts if name.startswith("torch")} == {"from every rank", "from rank 0", "from rank 1"}


def frame(file: str, line: int, function: str, code: str = "") -> str:
    """One frame as Python prints it."""
    return f'  File "{file}", line {line}, in {function}\n' + (f"    {code}\n" if code else "")


TORCH_FILE = torch.__file__
LIBRARY = "/env/lib/python3.11/site-packages/transformers/modeling_llama.py"
HEADER = "Traceback (most recent call last):\n"


@pytest.mark.parametrize(
    ("stack", "lines"),
    [
        ("", []),
        (frame("/u/a.py", 1, "f", "g()") + frame(TORCH_FILE, 2, "t"), ["/u/a.py:1, in f", "  g()"]),
        (
            frame("/u/a.py", 1, "f", "g()") + frame(LIBRARY, 2, "forward") + frame(TORCH_FILE, 3, "t"),
            ["/u/a.py:1, in f", "  g()", f"{LIBRARY}:2, in forward"],
        ),
        (frame(LIBRARY, 2, "forward", "x"), [f"{LIBRARY}:2, in forward", "  x"]),
        (frame(TORCH_FILE, 1, "t", "a") + frame(TORCH_FILE, 2, "u", "b"), [f"{TORCH_FILE}:2, in u", "  b"]),
        (f"{HEADER}{frame('/u/in.py', 1, 'f')}E\n\n{HEADER}{frame('/u/out.py', 2, 'g')}E", ["/u/out.py:2, in g"]),
        (f"{HEADER}{frame('/u/in.py', 1, 'f')}E\n\n{HEADER}{frame(TORCH_FILE, 2, 'g')}E", ["/u/in.py:1, in f"]),
        (frame("/u/a.py", 1, "f") + frame("/x/site-packages/torch/nn/m.py", 2, "t", "t"), ["/u/a.py:1, in f"]),
    ],
    ids=["none", "torch", "library", "only_library", "only_torch", "chain", "chain_in_torch", "other_host"],
)
def test_the_deepest_frame_of_the_user_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stack: str, lines: list[str]
) -> None:
    """A library's frame below it follows. torch's frames count only if there is nothing else."""
    monkeypatch.chdir(tmp_path)  # torch may be installed within the current folder, and would get a short name there
    assert place_lines(stack) == lines


def test_files_in_the_current_folder_have_short_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the folder is gone, the full name is shown."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert place_lines(frame(str(folder / "a.py"), 1, "f")) == ["a.py:1, in f"]
    folder.rmdir()
    assert place_lines(frame(str(folder / "a.py"), 1, "f")) == [f"{folder}/a.py:1, in f"]


def test_errors_that_differ_are_not_said_of_all_ranks() -> None:
    """Ranks that raised in the same place are one group, with the error of the first. A cause that it repeats is left out."""
    texts = ["rank 0 has no row, caused by KeyError: no row", "rank 1 has no row"]
    reports = [RankReport(rank=rank, state=RankState.RAISED, error=f"ValueError: {text}") for rank, text in enumerate(texts)]
    failure = Failure(kind=FailureKind.RAISED, summary="rank 0 raised", reports=tuple(reports), first=0)
    assert failure_lines(failure) == ["ranks 0, 1 raised ValueError", "error on rank 0: rank 0 has no row"]


def test_a_rank_that_died_shows_its_last_output() -> None:
    """The other ranks are said once, however many they are."""
    died = RankReport(rank=1, state=RankState.DIED, error="killed by SIGSEGV", stack="a\nFatal Python error\n")
    others = [RankReport(rank=rank, state=RankState.WAITING, pending="all_reduce") for rank in (0, 2, 3)]
    reports = tuple(sorted((died, *others), key=lambda report: report.rank))
    failure = Failure(kind=FailureKind.DIED, summary="rank 1 killed", reports=reports, first=1, remark="on host a")
    assert failure_lines(failure) == [
        "rank 1 died: killed by SIGSEGV",
        "printed: a",
        "         Fatal Python error",
        "ranks 0, 2, 3 wait in all_reduce",
        "note:  on host a",
    ]
