"""Tests for compilation and checkpointing in a layout."""

from __future__ import annotations

import json

import pytest

from equivcheck.scenario import DDP, Axis, Checkpointing, Compile, Data, Execution, Layer, Layout, Mesh, Model, Scenario, Training
from equivcheck.scenario.file_format.codec import from_json, to_json

LAYOUT = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(DDP(),))
SCENARIO = Scenario(
    training=Training(model=Model(features=1, layers=(Layer(width=1),)), data=Data(microbatches=(2,))), layout=LAYOUT
)


def test_a_layout_written_before_executions_is_run_plainly() -> None:
    """JSON without the field decodes to a layout without compilation or checkpointing."""
    data = json.loads(to_json(SCENARIO))
    del data["layout"]["execution"]
    assert from_json(json.dumps(data)) == SCENARIO
    assert SCENARIO.layout.execution == Execution(compile=Compile.NONE, compiled_autograd=False, checkpointing=Checkpointing.NONE)


@pytest.mark.parametrize(
    ("execution", "compiled"),
    [
        (Execution(), False),
        (Execution(checkpointing=Checkpointing.EVERY_LAYER), False),
        (Execution(compile=Compile.AOT_EAGER), True),
        (Execution(compile=Compile.INDUCTOR, per_layer=True), True),
        (Execution(compiled_autograd=True), True),
    ],
)
def test_forward_or_backward_makes_an_execution_compiled(execution: Execution, compiled: bool) -> None:
    """Checkpointing does not count as compilation."""
    assert execution.is_compiled is compiled
