"""Tables of a batch and of a fleet, for people."""

import io
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from mtx2vllm.converter.commands.sizes import size
from mtx2vllm.converter.fleet.contents import shown
from mtx2vllm.converter.fleet.versions import Fleet, Pruned, ReplicaRow, VersionRow

if TYPE_CHECKING:
    from mtx2vllm.converter.fleet.batch import Outcome

_WIDTH = 160  # where the output is no terminal


def rendered(*parts: Table | str) -> str:
    """Tables and lines as text, as wide as the terminal."""
    out = io.StringIO()
    console = Console(file=out, width=shutil.get_terminal_size((_WIDTH, 24)).columns, highlight=False, markup=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _table(*columns: str) -> Table:
    """Without lines, so that it can be cut and searched; a column named `x>` is flush right."""
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    return table


def batch_text(outcomes: Sequence["Outcome"]) -> str:
    """What became of each job, and the errors below."""
    table = _table("line>", "checkpoint", "step>", "layout", "out", "result", "tensors>", "size>", "seconds>")
    for o in outcomes:
        seconds = f"{o.seconds:.1f}" if o.result != "done before" else ""
        step = "" if o.step is None else str(o.step)
        table.add_row(
            str(o.line), o.checkpoint, step, o.layout, o.out, _result(o), str(o.tensors), size(o.bytes), seconds
        )
    failed = [o for o in outcomes if not o.ok]
    errors = [f"line {o.line}, {o.out}: {text}" for o in failed for text in o.errors]
    done = sum(o.result == "done before" for o in outcomes)
    total = f"{len(outcomes) - len(failed)} of {len(outcomes)} are there ({done} were before), {len(failed)} failed"
    spoilt = sum(bool(o.nonfinite) for o in outcomes)
    return rendered(table, *errors, total + f"; {spoilt} with NaN or infinity" * bool(spoilt))


def _result(outcome: "Outcome") -> str:
    if not outcome.nonfinite:
        return outcome.result
    return f"{outcome.result}, NaN or infinity in {_count(outcome.nonfinite, 'tensor')}"


def versions_text(fleet: Fleet) -> str:
    """Versions, newest first, then replicas, then who writes."""
    table = _table("version>", "size>", "age>", "state", "served by")
    for row in fleet.versions:
        table.add_row(
            str(row.step), "" if row.bytes is None else size(row.bytes), duration(row.age), _state(row), _names(row)
        )
    parts: list[Table | str] = [table] if fleet.versions else [f"{fleet.root} holds no versions"]
    if fleet.replicas:
        replicas = _table("replica", "state", "serves>", "behind", "heartbeat>", "error")
        for replica in fleet.replicas:
            replicas.add_row(
                replica.replica, replica.state if replica.alive else "dead (lease expired)",
                "" if replica.loaded is None else str(replica.loaded), _behind(replica),
                duration(replica.heartbeat_age), replica.error or "",
            )  # fmt: skip
        parts += ["", replicas]
    problems = [f"version {row.step}: {row.problem}" for row in fleet.versions if row.problem]
    pinned = [] if fleet.pin is None else [f"pinned to {fleet.pin}"]
    return rendered(*parts, "", *problems, *pinned, f"writer: {fleet.writer or 'none'}")


def _state(row: VersionRow) -> str:
    if row.foreign and not row.complete:
        return "not a version (foreign files)"
    lacks = "unreadable" if row.problem is not None and row.bytes is None else "incomplete"
    words = [
        "complete" if row.complete else "being written" if row.writing else lacks,
        "newest" * row.newest,
        "pinned" * row.pinned,
    ]
    return ", ".join(word for word in words if word)


def _names(row: VersionRow) -> str:
    shown = ", ".join(row.served_by[:4])
    return shown + (f" and {len(row.served_by) - 4} more" if len(row.served_by) > 4 else "")


def _behind(replica: ReplicaRow) -> str:
    if replica.behind is None or replica.lag is None:
        return ""
    if replica.behind == 0:
        return "up to date"
    if replica.lag < 0:
        return f"{_count(-replica.lag, 'step')} ahead of the pin"
    return f"{_count(replica.behind, 'version')}, {_count(replica.lag, 'step')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def duration(seconds: float | None) -> str:
    """Seconds in the unit that people would use."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def pruned_text(pruned: Pruned) -> str:
    """What went, or would go, and why the rest stays."""
    verb = "would remove" if pruned.dry_run else "removed"
    lines = [f"{verb} {step}" for step in pruned.removed]
    lines += [f"keeps {step}: {reason}" for step, reason in pruned.kept.items()]
    rest = "the directory stays for files that mtx2vllm did not write"
    lines += [f"{step}: {rest} ({shown(names)})" for step, names in pruned.left.items()]
    return "\n".join([*lines, f"{verb} {_count(len(pruned.removed), 'version')}, {size(pruned.freed)}"])
