"""How a child process begins: Ctrl-C is for its parent, and it does not outlive that.

The system kills it when the parent ends, however that ends and whatever the child is doing: also
where it is stopped, or holds the interpreter in native code and never sees that a socket hung up.
"""

from __future__ import annotations

import ctypes
import os
import signal

PARENT = "DOVETAIL_PARENT"
"""Environment variable of a child: the process that started it."""
PR_SET_PDEATHSIG = 1
"""Of prctl(2). The signal comes when the *thread* that started this process ends."""


def begin_child() -> None:
    """Have the system kill this process with its parent; call it first of all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.environ.pop(PARENT, None)
    if parent is None:  # somebody else started it
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before
        os._exit(0)
