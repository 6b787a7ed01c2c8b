"""The pytest plugin, tested in pytest runs inside pytest."""

from __future__ import annotations

import importlib.util
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import equivcheck
import equivcheck.scenario as nouns
from equivcheck.scenario import Scenario

pytest_plugins = ["pytester"]

INSTALLED = any(entry.value == "equivcheck.pytest_plugin" for entry in entry_points(group="pytest11"))
LOAD = () if INSTALLED else ("-p", "equivcheck.pytest_plugin")

CHECKS = """
    import pytest
    from equivcheck.system.tally import record_check

    @pytest.mark.parametrize("count", range(4))
    def test_passes(count):
        for _ in range(count):
            record_check("ddp", "sim", "equivalent")
        record_check("fsdp2 x tensor_parallel", "gloo", "inconclusive")

    def test_fails():
        record_check("ddp", "sim", "diverged")
        assert False
"""

TABLE = [
    "*= equivcheck: 11 scenarios =*",
    "layout                   world  equivalent  diverged  inconclusive",
    "ddp                      sim             6         1             0",
    "fsdp2 x tensor_parallel  gloo            0         0             4",
    "clearly equivalent: 6 of 11 (55%)",
]


@pytest.fixture
def runner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Run pytest in a separate process that inherits nothing."""
    monkeypatch.setenv("PYTHONPATH", str(Path(equivcheck.__file__).parents[1]))
    for name in ("PYTEST_ADDOPTS", "CI", "BUILD_NUMBER"):  # under the latter, pytest prints long errors a second time
        monkeypatch.delenv(name, raising=False)
    return pytester


def run(runner: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run pytest with the plugin."""
    return runner.runpytest_subprocess(*LOAD, *arguments, timeout=600)


def test_the_summary_counts_scenarios_by_layout_and_outcome(runner: pytest.Pytester) -> None:
    """Checks in passing and failing tests are counted."""
    runner.makepyfile(CHECKS)
    run(runner).stdout.fnmatch_lines(TABLE, consecutive=True)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_the_summary_is_the_same_with_workers(runner: pytest.Pytester) -> None:
    """Counts from xdist workers are included."""
    runner.makepyfile(CHECKS)
    run(runner, "-n", "2").stdout.fnmatch_lines(TABLE, consecutive=True)


def test_a_run_without_checks_has_no_summary_and_imports_neither_torch_nor_hypothesis(runner: pytest.Pytester) -> None:
    """The plugin costs nothing if no test uses it."""
    runner.makepyfile("""
        import sys

        def test_nothing():
            assert not {"torch", "hypothesis"} & set(sys.modules)
    """)
    result = run(runner)
    result.assert_outcomes(passed=1)
    assert "equivcheck:" not in result.stdout.str()


def test_worlds_are_closed_at_the_end_if_they_were_opened(runner: pytest.Pytester) -> None:
    """No rank outlives the session."""
    runner.makepyfile("""
        import sys
        from types import ModuleType

        def test_opens_a_world():
            pool = ModuleType("equivcheck.worlds.pool")
            pool.close_worlds = lambda: print("worlds are closed")
            sys.modules[pool.__name__] = pool
    """)
    assert run(runner, "-s").stdout.str().count("worlds are closed") == 1


@pytest.mark.parametrize(("profile", "examples"), [("equivcheck-ci", 100), ("equivcheck-dev", 20), ("equivcheck-nightly", 1000)])
def test_prefixed_profiles_can_be_selected(runner: pytest.Pytester, profile: str, examples: int) -> None:
    """Profiles are registered before Hypothesis's plugin loads one."""
    runner.makepyfile(f"""
        from hypothesis import settings

        def test_profile():
            assert settings().max_examples == {examples}
            assert settings().deadline is None
            assert settings.get_profile("ci").max_examples == settings.get_profile("default").max_examples == 100
    """)
    run(runner, f"--hypothesis-profile={profile}").assert_outcomes(passed=1)


def test_a_users_own_profile_of_the_same_name_is_left_alone(runner: pytest.Pytester) -> None:
    """Names without the prefix belong to users."""
    runner.makeconftest("from hypothesis import settings; settings.register_profile('dev', max_examples=7)")
    runner.makepyfile("""
        from hypothesis import settings

        def test_profile():
            assert settings().max_examples == 7
    """)
    run(runner, "--hypothesis-profile=dev").assert_outcomes(passed=1)


def test_a_falsifying_example_can_be_pasted(runner: pytest.Pytester) -> None:
    """Hypothesis prints the scenario as code."""
    runner.makepyfile("""
        from hypothesis import given, settings
        from equivcheck.strategies import scenarios

        @settings(max_examples=200, derandomize=True, database=None)
        @given(scenarios())
        def test_equivalent(scenario):
            assert scenario.training.clipping is None
    """)
    lines = [line.removeprefix("E").strip() for line in run(runner).stdout.lines if line.startswith("E ")]
    start = next(index for index, line in enumerate(lines) if line.endswith(": test_equivalent("))
    pasted = "dict(" + "\n".join(lines[start + 1 : lines.index(")", start) + 1])
    scenario = eval(pasted, vars(nouns).copy())["scenario"]
    assert isinstance(scenario, Scenario)
    assert scenario.training.clipping is not None


DIVERGES = """
    from hypothesis import given, settings, strategies as st
    from equivcheck import check
    from equivcheck.mutants.registry import mutant
    from equivcheck.scenario import *

    PLANT = mutant("gradients_summed").plant
    SCENARIO = Scenario(
        training=Training(model=Model(features=1, layers=(Layer(width=1),)), data=Data(microbatches=(2,))),
        layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(DDP(),)),
    )

    @settings(derandomize=True, database=None, deadline=None)
    @given(scenario=st.just(SCENARIO))
    def test_sums(scenario):
        check(scenario, alter=PLANT).assert_no_finding(alter=PLANT)
"""


@pytest.mark.slow
def test_a_failure_is_explained_once(runner: pytest.Pytester) -> None:
    """The text has the first divergence, its place and its cause once."""
    runner.makepyfile(DIVERGES)
    printed = run(runner).stdout.str()

    assert printed.count("first: step 0, gradient, layers.0.linear.weight[0, 0] on ranks 0, 1") == 1
    assert printed.count("the sum over the 2 dp ranks, not the mean") == 1
    assert printed.count("where: in the only step") == 1
