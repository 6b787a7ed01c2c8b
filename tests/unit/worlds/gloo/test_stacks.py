"""A rank's location, from its stack."""

from __future__ import annotations

import importlib.util
import os
import traceback

import pytest

from equivcheck.worlds.gloo.stacks import awaited_call, parse_dump
from equivcheck.worlds.processes.preload import COMMON, RARE

TORCH = os.path.join(os.sep, "site-packages", "torch")
USER = ("/home/user/model.py", 3, "step")
DUMP = """Thread 0x00000000000000ff (most recent call first):
  File "/x/threading.py", line 1, in wait

Current thread 0x00000000000000AA (most recent call first):
  File "/x/model.py", line 7 in inner
  File "/x/model.py", line 5 in outer
"""


def stack(*frames: tuple[str, int, str]) -> traceback.StackSummary:
    """Frames, innermost last."""
    return traceback.StackSummary.from_list([traceback.FrameSummary(*frame) for frame in frames])


def test_one_thread_is_read_from_a_dump() -> None:
    """Only frames of the given thread are returned, innermost last."""
    assert [(frame.name, frame.lineno) for frame in parse_dump(DUMP, 0xAA)] == [("outer", 5), ("inner", 7)]
    assert not parse_dump(DUMP, 0xBB)


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        (
            (USER, (f"{TORCH}/distributed/c10d_logger.py", 1, "wrapper"), (f"{TORCH}/distributed/c10d.py", 1, "barrier")),
            "barrier",
        ),
        ((USER, (f"{TORCH}/_tensor.py", 1, "backward"), (f"{TORCH}/autograd/graph.py", 1, "_engine_run_backward")), "backward"),
        ((USER, (f"{TORCH}/nn/functional.py", 1, "linear")), ""),
        (
            (USER, (f"{TORCH}/nn/parallel/distributed.py", 1, "__init__"), (f"{TORCH}/distributed/utils.py", 1, "_verify_shape")),
            "_verify_shape",
        ),
        (((f"{TORCH}/distributed/fsdp/hooks.py", 1, "hook"), USER), ""),
        ((), ""),
    ],
)
def test_waiting_is_told_by_where_the_stack_ends(frames: tuple[tuple[str, int, str], ...], name: str) -> None:
    """A rank waits if its stack ends in communication, not if it has only passed through some."""
    assert awaited_call(stack(*frames)) == name


def test_what_is_preloaded_exists() -> None:
    """Every module imported by the fork server exists in this torch version."""
    assert all(importlib.util.find_spec(name) for name in COMMON + RARE)
