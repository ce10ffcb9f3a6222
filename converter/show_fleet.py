"""Tables of a batch and of a fleet, for people."""

import io
import shutil
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from mtx2vllm.converter.batch import Outcome
from mtx2vllm.converter.show import size

_WIDTH = 160  # where the output is no terminal


def rendered(*parts: Table | str) -> str:
    """Tables and lines as text, as wide as the terminal."""
    out = io.StringIO()
    console = Console(file=out, width=shutil.get_terminal_size((_WIDTH, 24)).columns, highlight=False, markup=False)
    for part in parts:
        console.print(part)
    return out.getvalue().rstrip("\n")


def batch_text(outcomes: Sequence[Outcome]) -> str:
    """What became of each job, and the errors below."""
    table = Table(box=None, pad_edge=False, header_style="")
    for name, right in (("line", 1), ("checkpoint", 0), ("step", 1), ("layout", 0), ("out", 0), ("result", 0),
                        ("tensors", 1), ("size", 1), ("seconds", 1)):  # fmt: skip
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for o in outcomes:
        seconds = f"{o.seconds:.1f}" if o.result != "done before" else ""
        step = "" if o.step is None else str(o.step)
        table.add_row(
            str(o.line), o.checkpoint, step, o.layout, o.out, o.result, str(o.tensors), size(o.bytes), seconds
        )
    failed = [o for o in outcomes if not o.ok]
    errors = [f"line {o.line}, {o.out}: {text}" for o in failed for text in o.errors]
    done = sum(o.result == "done before" for o in outcomes)
    total = f"{len(outcomes) - len(failed)} of {len(outcomes)} are there ({done} were before), {len(failed)} failed"
    return rendered(table, *errors, total)
