"""The command line. `--help` imports click alone: every command imports its work when it runs."""

import importlib
import sys
from typing import Any

import click

# name -> module with the click command of that name (dashes as underscores)
COMMANDS = {
    "convert": "mtx2vllm.converter.commands.convert",
    "plan": "mtx2vllm.converter.commands.convert",
    "inspect": "mtx2vllm.converter.commands.convert",
    "verify": "mtx2vllm.converter.commands.convert",
    "fetch": "mtx2vllm.converter.commands.convert",
    "follow": "mtx2vllm.converter.commands.fleet",
    "batch": "mtx2vllm.converter.commands.fleet",
    "adopt": "mtx2vllm.converter.commands.fleet",
    "versions": "mtx2vllm.converter.commands.fleet",
    "pin": "mtx2vllm.converter.commands.fleet",
    "unpin": "mtx2vllm.converter.commands.fleet",
    "prune": "mtx2vllm.converter.commands.fleet",
    "validate": "mtx2vllm.converter.commands.engine",
    "doctor": "mtx2vllm.converter.commands.engine",
}


class _Lazy(click.Group):
    """Commands in the order above, imported when asked for; our errors become one message and their exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name]), cmd_name)
        return command if isinstance(command, click.Command) else None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.exceptions.Exit:
            raise
        except (click.ClickException, click.Abort, BrokenPipeError):
            raise  # click's own affair
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)
        except Exception as error:
            sys.exit(_report(error))


def _report(error: Exception) -> int:
    """Print what went wrong and give the exit status. A traceback is for our own mistakes, and only when asked for."""
    import os

    from mtx2vllm.converter.errors import InputError, Mtx2vllmError, from_os_error

    if isinstance(error, OSError):
        error = from_os_error(error)
    if isinstance(error, MemoryError):
        error = Mtx2vllmError("there is not enough memory; choose a smaller --memory-budget, or fewer --workers")
    if isinstance(error, Mtx2vllmError):
        problems = error.problems if isinstance(error, InputError) else str(error).splitlines()
        for problem in problems[:50]:
            click.echo(f"error: {problem}", err=True)
        if len(problems) > 50:
            click.echo(f"error: and {len(problems) - 50} more problems", err=True)
        return error.exit_status
    if os.environ.get("MTX2VLLM_TRACEBACK"):
        raise error
    click.echo(
        f"error: {type(error).__name__}: {error}. This is a fault in mtx2vllm; run again with MTX2VLLM_TRACEBACK=1 and report "
        "what it prints",
        err=True,
    )
    return 1


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mtx2vllm", message="%(prog)s %(version)s")
def main() -> None:
    """MaxText checkpoints to vLLM.

    Exit status: 0 done, 1 our failure or a full disk, 2 usage, 3 bad or unsupported input, 4 a difference was found,
    130 interrupted.
    """
