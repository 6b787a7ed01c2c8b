"""Entry point of worker processes."""

from __future__ import annotations

import gc
import importlib
import time
import traceback

from equivcheck.campaign.plan import Plan, oracle_check
from equivcheck.campaign.workers.messages import Broken, Checked, CheckOne, Done, Fuzz, Ready, Spent
from equivcheck.campaign.workers.recorder import Recorder
from equivcheck.campaign.workers.worker import CheckerBroke, Worker
from equivcheck.errors import EquivCheckError, UsageError
from equivcheck.system.collection import COLLECTION_THRESHOLDS
from equivcheck.worlds.processes.preload import preload
from equivcheck.worlds.workers.link import SupervisorLink


def main(fd: int, recorder_fd: int) -> None:
    """Run a worker: draw and check cases for the supervisor at the other end of the socket `fd`.

    `recorder_fd` is the file descriptor of its `Recorder`.
    """
    link = SupervisorLink(fd)
    plan, place = link.task
    try:
        worker = Worker(plan, place, link, Recorder.open_inherited(recorder_fd))
        import_everything(plan)
        link.send(Ready())
        order = link.next()
        if isinstance(order, Fuzz):
            worker.fuzz(order.seconds, order.num_checks)
        elif isinstance(order, CheckOne):
            start = time.monotonic()
            verdict = worker.check(order.case, beyond=order.beyond)
            link.send(Checked(verdict=verdict, seconds=time.monotonic() - start))
        link.send(Spent() if worker.is_spent else Done())
    except CheckerBroke as broke:
        link.send(_broken(broke.__cause__, f"while checking\n{broke.args[0]!r}"))
    except Exception as error:
        link.send(_broken(error, ""))


def import_everything(plan: Plan) -> None:
    """Import torch and the strategies before the campaign's time starts."""
    if plan.check is oracle_check:
        importlib.import_module("equivcheck.checking.cases")
        preload()
    for strategy in filter(None, (plan.strategy, plan.programs)):
        strategy(plan).validate()
    gc.freeze()  # imported modules stay, so garbage collections need not visit them
    gc.set_threshold(*COLLECTION_THRESHOLDS)


def _broken(error: BaseException | None, context: str) -> Broken:
    # These errors are raised on purpose: neither a traceback nor the case would say more.
    if isinstance(error, EquivCheckError):
        return Broken(summary=" ".join(str(error).split()), trace="", is_usage=isinstance(error, UsageError))
    trace = "".join(traceback.format_exception(error)) if error else ""
    return Broken(summary=f"{type(error).__name__}: {error}".splitlines()[0], trace=f"{trace}{context}")
