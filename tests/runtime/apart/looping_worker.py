"""The engine's process, whose steps are slow, and never end once a prompt begins with LOOP."""

from __future__ import annotations

import os
import runpy
import time
from typing import Any

from dovetail.runtime.engine import Engine

LOOP = 13
STEP_SECONDS = "LOOPING_WORKER_STEP"

if __name__ == "__main__":
    execute, seconds = Engine._execute, float(os.environ.get(STEP_SECONDS, "0"))

    def loop(self: Engine, plan: Any) -> Any:
        found = [self.scheduler.requests[number] for number in plan.members]
        while any(request.tokens[0] == LOOP for request in found):
            pass
        time.sleep(seconds)
        return execute(self, plan)

    Engine._execute = loop  # type: ignore[method-assign]
    runpy.run_module("dovetail.runtime.apart.worker", run_name="__main__")
