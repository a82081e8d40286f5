"""Work in a process of its own that need not import anything: a fork of this one."""

import os
import traceback
import warnings
from collections.abc import Callable

import torch


def forked(work: Callable[[], object]) -> int:
    """The exit code of a process that does the work; what it raises is printed."""
    with warnings.catch_warnings():
        # Threads of this process do not go along; the work uses none of theirs.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        torch.set_num_threads(1)
        work()
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
