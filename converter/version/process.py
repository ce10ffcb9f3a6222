"""Which process holds something, so that another one on the same host can ask whether it still lives.

A process number alone comes back, and two containers may share a host's name: the start time and the namespace of the
numbers tell them apart.
"""

import socket
from pathlib import Path


def started(pid: int) -> int:
    """Start time of a live process in clock ticks since boot, 0 where it cannot be known (proc(5), field 22)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def namespace() -> str:
    """Which process numbers are meant (pid_namespaces(7))."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def lives(host: str, pid: int, began: int, numbers: str) -> bool | None:
    """Whether a recorded process still runs; None where only its heartbeat can tell."""
    if host != socket.gethostname() or not began or numbers != namespace():
        return None
    return started(pid) == began
