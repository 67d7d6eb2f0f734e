"""The engine's process, whose steps are slow, and never end once a prompt begins with LOOP."""

from __future__ import annotations

import os
import time
from typing import Any

from dovetail.runtime.child.framing import Channel
from dovetail.runtime.engine.engine import Engine
from dovetail.runtime.hosting import worker
from dovetail.runtime.schedule.request import Request

LOOP = 13
STEP_SECONDS = "LOOPING_WORKER_STEP"


execute, SECONDS = Engine._execute, float(os.environ.get(STEP_SECONDS, "0"))


def loop(self: Engine, plan: Any, touched: list[Request]) -> None:
    found = [self.scheduler.requests[number] for number in plan.members]
    while any(request.tokens[0] == LOOP for request in found):
        pass
    time.sleep(SECONDS)
    execute(self, plan, touched)


def serve(channel: Channel, progress: int) -> None:
    Engine._execute = loop  # type: ignore[method-assign]
    worker.serve(channel, progress)
