"""Python stack for a process without an answer, and whether it waits for other ranks."""

from __future__ import annotations

import contextlib
import os
import re
import time
import traceback
from pathlib import Path

from equivcheck.worlds.gloo import answer, matching, rank

_PATIENCE = 1.0
"""Seconds for a process to write its stacks; a stopped process never writes them."""
_SETTLED = 0.02
"""Seconds without growth after which a dump counts as complete, because it has no end mark."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.IGNORECASE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_TORCH = f"{os.sep}torch{os.sep}"
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_OURS = (rank.__file__, answer.__file__)
_MATCHING = os.path.dirname(matching.__file__) + os.sep
_NO_COLLECTIVES = ("wrapper", "__call__", "inner", "forward", "backward")
"""Functions in torch.distributed through which other calls pass."""

Stack = traceback.StackSummary


def ask_for_stacks(pids: tuple[int, ...]) -> None:
    """Make each process write its threads' stacks to its own stack file."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, rank.STACK_SIGNAL)


def read_stack(fd: int, thread: int) -> Stack:
    """Wait for a stack dump in file `fd`, and return the stack of `thread`, innermost frame last. Empty if no dump comes."""
    limit = time.monotonic() + _PATIENCE
    size = -1
    while time.monotonic() < limit and (size <= 0 or size != os.fstat(fd).st_size):
        size = os.fstat(fd).st_size
        time.sleep(_SETTLED)
    return parse_dump(os.pread(fd, 1 << 20, 0).decode(errors="replace"), thread)


def parse_dump(dump: str, thread: int) -> Stack:
    """Return the stack frames of `thread`, from a dump by Python's faulthandler."""
    frames: list[traceback.FrameSummary] = []
    inside = False
    for line in dump.splitlines():
        if header := _THREAD.match(line):
            inside = int(header[1], 16) == thread
        elif inside and (frame := _FRAME.match(line)):
            frames.append(traceback.FrameSummary(frame[1], int(frame[2]), frame[3]))
    return traceback.StackSummary.from_list(of_program(frames[::-1]))


def of_program(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the stack frames inside the rank's program. Empty if the rank was not running a program.

    Frames of equivcheck's own comparison of collectives are left out.
    """
    compared = (index for index, frame in enumerate(frames) if frame.filename.startswith(_MATCHING))
    frames = frames[: next(compared, None)]
    ours = [index for index, frame in enumerate(frames) if frame.filename in _OURS]
    return frames[ours[-1] + 1 :] or frames if ours else frames


def is_asleep(pid: int) -> bool:
    """Whether the main thread of a process is blocked. True if the process has ended or its state cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] != "R"


def awaited_call(stack: Stack) -> str:
    """Guess the call in which a blocked rank waits, such as ``all_reduce``, ``wait`` or ``backward``; empty if there is none.

    `stack` is the rank's stack. The guess uses the innermost frames in torch.distributed or autograd, or a call to ``wait``. It
    may be a private name, because DDP compares parameters in a private function.
    """
    private = ""
    for frame in reversed(stack):
        if _DISTRIBUTED in frame.filename and frame.name not in _NO_COLLECTIVES:
            if not frame.name.startswith("_"):
                return frame.name
            private = private or frame.name
        if _TORCH not in frame.filename:
            return "wait" if ".wait(" in (frame.line or "") else private
        if frame.name == "_engine_run_backward":
            return "backward"
    return private
