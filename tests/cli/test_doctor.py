"""What works here."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from equivcheck import doctor
from equivcheck.cli.doctor import doctor as command
from equivcheck.cli.shell import ExitCode
from equivcheck.composition.registry import layout_kinds
from equivcheck.doctor import PROGRAMS, probe, probe_program, smallest
from equivcheck.scenario import DDP
from supported import require_supported


@pytest.mark.parametrize("tag", layout_kinds())
def test_every_layout_works_in_simulation(tag: str) -> None:
    """The smallest training of every layout runs, so that a doctor's bad news is about the machine."""
    parallelism = layout_kinds()[tag].parallelism
    require_supported(smallest(parallelism))
    found = probe("sim", tag, parallelism)
    assert found.works, found.reason


@pytest.mark.parametrize("subject", PROGRAMS)
def test_simulated_ranks_keep_apart_what_torch_keeps_for_a_process(subject: str) -> None:
    """The programs whose answer is known are right in sim, as they are on processes."""
    found = probe_program("sim", subject, PROGRAMS[subject])
    assert found.works, found.reason


def test_a_program_that_is_wrong_names_its_arguments_and_ranks() -> None:
    """Bad news says how to see it again."""
    found = probe_program("sim", "three", (on_rank_three, ((1,), (0,))))
    assert found.reason == "on_rank_three(0,) is wrong on ranks [3]"


def on_rank_three(right: int) -> list[bool]:
    """Whether this is another rank, or it is right anyway."""
    return [dist.get_rank() != 3 or bool(right)]


def test_what_goes_wrong_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world that cannot start is one line of bad news, not a traceback."""

    def check(*_: object, **__: object) -> None:
        raise OSError("no network\nat all")

    monkeypatch.setattr("equivcheck.oracle.check.check", check)
    found = probe("gloo", "ddp", DDP)
    assert not found.works
    assert found.reason == "OSError: no network at all"


def test_unknown_state_of_torch_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a newer torch keeps for the process is named, and is no reason to fail."""
    monkeypatch.setattr(doctor, "probe_everything", lambda: iter(()))
    monkeypatch.setattr(doctor, "found_here", lambda: ("torch.optim.new._cache", "torch._ops.cached_ops"))
    ended = CliRunner().invoke(command, ["--json"], standalone_mode=False)
    assert json.loads(ended.stdout)["unknown_state"] == ["torch.optim.new._cache"]
    assert ended.return_value == ExitCode.NOTHING_FOUND


def test_the_smallest_scenario_has_two_ranks() -> None:
    """One rank would prove nothing about communication."""
    for kind in layout_kinds().values():
        assert smallest(kind.parallelism).layout.mesh.num_ranks == doctor._NUM_RANKS == 2
