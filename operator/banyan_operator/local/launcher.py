"""A tiny init around one container's process. Run as a script, with nothing but the standard library.

    python -I -S launcher.py LIFELINE_FD COMMAND [ARG...]

It is started as the leader of a session, hands SIGTERM and SIGINT on to COMMAND alone (as a container runtime does to
process 1), and ends with COMMAND's exit code, 128+n for a signal. Nothing survives it: what COMMAND leaves behind is killed, and when
the other end of the lifeline pipe closes (the operator died, or wants the container dead) everything is killed at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILLED = 128 + signal.SIGKILL


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Every process below `root`, also those that made a session of their own."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (pathlib costs this script half of its start-up time)
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    # the command in parentheses may hold anything, also parentheses; the parent is the second field after it
                    parent = int(stat.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def reap(child: int) -> int | None:
    """Collect ended processes; the exit code of `child` if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)


def kill_all(child: int) -> None:
    """SIGKILL to everything below, until nothing is left. Processes stuck in the kernel are given up after 5 s."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap(child)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            return


def start(argv: list[str]) -> int:
    """Fork and run `argv`; its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(KILLED)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def main(lifeline: int, argv: list[str]) -> int:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for caught in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(caught, lambda *_: None)
    os.set_inheritable(lifeline, False)
    child = start(argv)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if lifeline in ready:
            kill_all(child)
            return KILLED
        for number in os.read(woken, 64):
            if number == signal.SIGCHLD:
                code = reap(child)
                if code is not None:
                    kill_all(child)
                    return code if code >= 0 else 128 - code
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, number)


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), sys.argv[2:]))
