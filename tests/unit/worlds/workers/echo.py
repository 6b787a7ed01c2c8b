"""A worker that says what it is told."""

from __future__ import annotations

import os
import subprocess
import time

from equivcheck.worlds.workers.link import SupervisorLink


def main(fd: int) -> None:
    """First the task, then every message; some have it do something else."""
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
    """What cannot be read by the process that it is sent to."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("no_such_name",)
