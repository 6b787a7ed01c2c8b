"""A worker that repeats messages."""

from __future__ import annotations

import os
import subprocess
import time

from equivcheck.worlds.workers.link import SupervisorLink


def main(fd: int) -> None:
    """Send the task, then every message; some messages trigger other actions."""
    link = SupervisorLink(fd)
    link.send(link.task)
    while True:
        message = link.next()
        if message == "die":
            os.abort()
        elif message == "exit":
            print("bye", flush=True)
            os._exit(3)
        elif message == "start another":
            link.send(subprocess.Popen(["sleep", "60"]).pid)
        elif message == "until stopped":
            link.stopped.wait()
            link.send("stopped")
        elif message == "loop":
            while True:
                time.sleep(0.01)
        else:
            link.send(message)


class Unreadable:
    """A value whose unpickling fails in the receiver."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("no_such_name",)
