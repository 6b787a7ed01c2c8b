"""`tools.bench_batching`: both costs are measured."""

from __future__ import annotations

import json

from click.testing import CliRunner

from tools.bench_batching import main


def test_both_costs_are_measured() -> None:
    """One device has at least eight arrangements. Ranks add distributions, each with a cost of its own."""
    result = CliRunner().invoke(main, ["--repetitions", "1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["one_device"] > 0
    assert found["arrangements"] >= 8
    assert "per_distribution" in found
