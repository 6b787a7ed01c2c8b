"""`tools.bench_recording`: all figures are measured."""

from __future__ import annotations

import json

from click.testing import CliRunner

from tools.bench_recording import main


def test_all_figures_are_measured() -> None:
    """On a small model. JSON has numbers with their limits, and a table is for people."""
    result = CliRunner().invoke(main, ["--small", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)["figures"]
    assert len(figures) == 8
    assert all(figure["value"] > 0 for figure in figures if "overhead" not in figure["name"])
    (size,) = (figure["value"] for figure in figures if figure["name"] == "bytes a tensor and moment")
    assert size <= 600
    assert "ms a small tensor" in CliRunner().invoke(main, ["--small", "--repeats", "1"]).stdout
