"""`tools.bench`: measured scenarios and rows."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from equivcheck.layouts.composition.limits import limit_reason
from tools import bench
from tools.bench import DEFAULT_LAYOUTS, DEFAULT_SIZES, fixed_scenarios, generated_scenarios, main, measure_row


@pytest.mark.parametrize(("tag", "size"), [("ddp", 2), ("tensor_parallel", 4)])
def test_the_same_scenarios_are_drawn_every_time(tag: str, size: int) -> None:
    """Generated scenarios are those of the row, can be run, and are the same in every run."""
    drawn = generated_scenarios(tag, size, 4)
    assert drawn == generated_scenarios(tag, size, 4)
    assert [(scenario.layout.name, scenario.layout.mesh.num_ranks) for scenario in drawn] == [(tag, size)] * 4
    assert [limit_reason(scenario.training, scenario.layout) for scenario in drawn] == [None] * 4


@pytest.mark.parametrize("size", DEFAULT_SIZES)
@pytest.mark.parametrize("tag", DEFAULT_LAYOUTS)
def test_the_fixed_training_runs_everywhere(tag: str, size: int) -> None:
    """Three linears, AdamW, three steps: one structure, other data each time, within the limits of every layout."""
    scenarios = fixed_scenarios(tag, size, 3)
    assert len({scenario.training.seed for scenario in scenarios}) == 3
    assert [limit_reason(scenario.training, scenario.layout) for scenario in scenarios] == [None] * 3


def test_every_world_is_measured_on_data_that_no_other_check_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measured check finds a reference that an earlier one left; with no spawned scenario that column is empty."""
    seen: list[int] = []
    real = bench.check

    def check(scenario: bench.Scenario, **options: str) -> object:
        seen.append(scenario.training.seed)
        return real(scenario, world="sim")

    monkeypatch.setattr(bench, "check", check)
    row = measure_row("ddp", 2, is_fixed=True, num_scenarios=3, num_spawned=0)
    assert len(seen) == 3 * 4
    assert len(set(seen)) == len(seen)
    assert row.scenarios == 3
    assert row.spawn_ms is None
    assert row.speedup_over_spawn is None
    assert row.sim_ms is not None
    assert row.ranks_only_ms is not None


def test_the_command_prints_a_row_for_each_layout_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has all figures with null for those that were not measured; people get a table."""
    row = bench.BenchRow(layout="ddp", ranks=2, scenarios=3, sim_ms=10.0, gloo_ms=40.0, spawn_ms=None, ranks_only_ms=4.0)
    monkeypatch.setattr(bench, "measure_row", lambda *_, **__: row)
    result = CliRunner().invoke(main, ["--layout", "ddp", "--ranks", "2", "--json"])
    (found,) = json.loads(result.stdout)["rows"]
    assert (found["speedup_over_gloo"], found["speedup_over_spawn"], found["oracle_share"]) == (4.0, None, 0.6)
    assert "60%" in CliRunner().invoke(main, ["--layout", "ddp", "--ranks", "2"]).stdout


@pytest.mark.parametrize(("option", "value", "words"), [("--scenarios", "0", "--scenarios"), ("--layout", "nope", "spmd")])
def test_bad_input_is_refused(option: str, value: str, words: str) -> None:
    """Exit code 2, an empty stdout, and an error that names the option or the valid choices."""
    result = CliRunner().invoke(main, [option, value])
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
