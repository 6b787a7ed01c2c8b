"""`equivcheck doctor` shows which worlds and layouts work."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from click.testing import CliRunner, Result
from rich.console import Console

from equivcheck.cli.checker.doctor import _watched
from equivcheck.cli.checker.doctor import doctor as command
from equivcheck.cli.shell import ExitCode
from equivcheck.layouts.composition.registry import layout_kinds
from equivcheck.quality import doctor
from equivcheck.quality.doctor import PROGRAMS, Probe, probe, probe_program, smallest_scenario
from equivcheck.scenario import DDP
from equivcheck.worlds.gloo.fork_server import ForkServer
from support.supported import require_supported


@pytest.mark.parametrize("tag", layout_kinds())
def test_every_layout_works_in_simulation(tag: str) -> None:
    """Each layout's smallest training runs, so a failure in the doctor's table is about the machine."""
    parallelism = layout_kinds()[tag].parallelism
    require_supported(smallest_scenario(parallelism))
    found = probe("sim", tag, parallelism)
    assert found.works, found.reason


@pytest.mark.parametrize("subject", PROGRAMS)
def test_simulated_ranks_keep_apart_what_torch_keeps_for_a_process(subject: str) -> None:
    """Programs with known results give them in sim, as on processes."""
    found = probe_program("sim", subject, PROGRAMS[subject])
    assert found.works, found.reason


def test_a_program_that_is_wrong_names_its_arguments_and_ranks() -> None:
    """The reason of a failure suffices to repeat it."""
    found = probe_program("sim", "three", (on_rank_three, ((1,), (0,))))
    assert found.reason == "on_rank_three(0,) is wrong on ranks [3]"


def on_rank_three(right: int) -> list[bool]:
    """Fail on rank 3."""
    return [dist.get_rank() != 3 or bool(right)]


def test_what_goes_wrong_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a world cannot start, the table has one line and no traceback."""

    def check(*_: object, **__: object) -> None:
        raise OSError("no network\nat all")

    monkeypatch.setattr("equivcheck.checking.check.check", check)
    found = probe("gloo", "ddp", DDP)
    assert not found.works
    assert found.reason == "OSError: no network at all"


def doctor_of(monkeypatch: pytest.MonkeyPatch, probes: list[Probe], names: tuple[str, ...], *options: str) -> Result:
    """Run the command with given results instead of probes."""
    monkeypatch.setattr(doctor, "probe_everything", lambda: iter(probes))
    monkeypatch.setattr("equivcheck.worlds.audit.found.Search", lambda: nullcontext(SimpleNamespace(names=lambda: names)))
    monkeypatch.setattr(ForkServer, "started_early", lambda _server: nullcontext())
    return CliRunner().invoke(command, options, standalone_mode=False)


def test_unknown_state_of_torch_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process state from a newer torch is named; the exit code stays 0."""
    ended = doctor_of(monkeypatch, [], ("torch.optim.new._cache", "torch._ops.cached_ops"), "--json")
    assert json.loads(ended.stdout)["unknown_state"] == ["torch.optim.new._cache"]
    assert ended.return_value == ExitCode.NOTHING_FOUND


def test_each_result_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are only on stdout, because a program may read both streams."""
    ended = doctor_of(monkeypatch, PROBES, ())
    assert [line.split() for line in ended.stdout.splitlines() if "works" in line] == [["ddp", "works", "works"]]
    assert not ended.stderr


def test_a_terminal_shows_the_last_probe_until_all_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is erased at the end."""
    screen = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    monkeypatch.setattr("equivcheck.cli.checker.doctor.console", lambda **_: screen)
    assert _watched(iter(PROBES)) == PROBES
    assert "gloo ddp: works" in screen.file.getvalue()
    assert screen.file.getvalue().endswith(LINE_UP + ERASE_LINE)


PROBES = [Probe(world=world, subject="ddp", works=True, reason="", known="", seconds=0.0) for world in ("sim", "gloo")]
LINE_UP, ERASE_LINE = "\x1b[1A", "\x1b[2K"


def test_the_smallest_scenario_has_two_ranks() -> None:
    """A single rank would prove nothing about communication."""
    for kind in layout_kinds().values():
        assert smallest_scenario(kind.parallelism).layout.mesh.num_ranks == doctor._NUM_RANKS == 2
