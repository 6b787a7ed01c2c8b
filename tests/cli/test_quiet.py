"""Commands print no remarks from torch on stderr."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings

import pytest

from equivcheck.scenario import DDP, SPMD, Axis, Data, Distribution, Layer, Layout, Mesh, Model, Parallelism, Scenario, Training
from equivcheck.scenario.file_format.codec import to_json
from equivcheck.system.quiet import quiet_environment, quiet_torch

TRAINING = Training(model=Model(features=4, layers=(Layer(width=4),) * 2), data=Data(microbatches=(4,)))
PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}
CHECK_STDIN = """
import sys
from equivcheck import check
from equivcheck.scenario.file_format.codec import from_json
check(from_json(sys.stdin.read()))
"""


@pytest.fixture(
    params=[
        pytest.param(DDP(find_unused_parameters=True), id="ddp"),
        pytest.param(SPMD(distribution=Distribution.FULLY_SHARD), id="spmd", marks=pytest.mark.slow),
    ]
)
def remarked_on(request: pytest.FixtureRequest) -> str:
    """A scenario on which torch remarks: DDP in C++, DTensor through its logger."""
    parallelism: Parallelism = request.param
    layout = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(parallelism,))
    return to_json(Scenario(training=TRAINING, layout=layout))


def stderr_of(arguments: list[str], scenario: str, environment: dict[str, str]) -> str:
    """Return the stderr of a Python process that gets a scenario on stdin."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment | PATH, input=scenario, capture_output=True, text=True, timeout=600, check=True
    ).stderr


def test_a_command_prints_only_its_own_lines(remarked_on: str) -> None:
    """Torch's remarks on a scenario are not printed."""
    environment = {name: value for name, value in os.environ.items() if name not in quiet_environment({})}
    assert stderr_of(["-m", "equivcheck", "check", "-"], remarked_on, environment) == ""


@pytest.mark.slow
def test_the_processes_of_a_campaign_are_quiet(remarked_on: str) -> None:
    """A worker's output is kept only for its last words."""
    assert stderr_of(["-c", CHECK_STDIN], remarked_on, quiet_environment(os.environ)) == ""


def test_what_the_user_has_set_stays() -> None:
    """If you ask torch for its logs, you get them."""
    assert quiet_environment({"TORCH_LOGS": "+distributed", "HOME": "/"})["TORCH_LOGS"] == "+distributed"
    assert quiet_environment({"HOME": "/"}).items() > {"HOME": "/", "TORCH_CPP_LOG_LEVEL": "ERROR"}.items()


def test_the_environment_is_as_it_was_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command inside another program restores the environment."""
    monkeypatch.setenv("TORCH_LOGS", "+distributed")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    before = dict(os.environ)
    with quiet_torch():
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
        assert os.environ["TORCH_LOGS"] == "+distributed"
        warnings.warn("not seen", UserWarning, stacklevel=1)
    assert dict(os.environ) == before
    with pytest.warns(UserWarning, match="seen"):
        warnings.warn("seen", UserWarning, stacklevel=1)


def test_what_torch_logs_and_then_raises_is_not_printed(caplog: pytest.LogCaptureFixture) -> None:
    """If ranks refuse an operation, only the verdict has the error; other messages from that logger are printed."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def log(text: str) -> None:
        try:
            raise ValueError(text)
        except ValueError:
            logger.exception(text)

    with caplog.at_level(logging.ERROR, logger=logger.name), quiet_torch():
        caplog.handler.setLevel(logging.ERROR)
        logger.addHandler(caplog.handler)
        log("raised")
        logger.error("said")
    log("raised afterwards")
    logger.removeHandler(caplog.handler)
    assert {record.message for record in caplog.records} == {"said", "raised afterwards"}
