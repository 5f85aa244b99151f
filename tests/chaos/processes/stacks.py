"""What a process of a cluster that is stuck waits for: `SIGUSR1` prints all its tasks, and those that failed unseen.

listen()        in the process (tests/chaos/processes/unsynced.py)
kill -USR1 PID  its log then has the stack of each task, and the exception of each that ended with one
"""

import asyncio
import gc
import signal
import sys
import traceback


def listen() -> None:
    signal.signal(signal.SIGUSR1, lambda _number, _frame: show())


def show() -> None:
    tasks = [each for each in gc.get_objects() if isinstance(each, asyncio.Task)]
    for task in sorted(tasks, key=lambda each: each.get_name()):
        if not task.done():
            try:
                task.print_stack(file=sys.stderr)
            except TypeError:  # a frame that is in no line
                print(task, file=sys.stderr)
        elif not task.cancelled() and (error := task.exception()) is not None:
            print(f"{task.get_name()} failed:", file=sys.stderr)
            traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
