"""convert, plan, inspect, verify, fetch."""

import json
import sys
from typing import Any

import click


class Size(click.ParamType[int]):
    """A number of bytes: 4GiB, 500MB, 1073741824."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        from mtx2vllm.converter.commands.sizes import parse_size

        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


LAYOUT = click.option(
    "--layout", type=click.Choice(["canonical", "hf"]), default="canonical", show_default=True,
    help="canonical: for the reload agent. hf: for vllm serve, transformers, everything else.",
)  # fmt: skip
ROPE = click.option(
    "--rope", type=click.Choice(["interleaved", "half"]),
    help="Rotary convention of a Llama checkpoint. Default: interleaved for rope type llama3, half otherwise.",
)  # fmt: skip
DTYPE = click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32", "source"]), default="bfloat16", show_default=True,
    help="Of the weights written; the few that vLLM keeps in float32 stay so.",
)  # fmt: skip
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def conversion_options(command: Any) -> Any:
    """The options that convert and follow share."""
    options = [
        click.option(
            "--hf-config", help="config.json, a directory with one, or a Hub id. Default: looked for at CKPT."
        ),
        click.option(
            "--base", help="Hugging Face directory whose other weights (vision tower, ...) are copied; hf layout."
        ),
        LAYOUT,
        DTYPE,
        ROPE,
        click.option("--text-only", is_flag=True, help="Leave vision weights of the checkpoint out."),
        click.option("--allow-uncommitted", is_flag=True, help="Accept a step without its commit marker."),
        click.option("--max-shard-size", type=Size(), default="4GiB", show_default=True),
        click.option("--memory-budget", type=Size(), default="1GiB", show_default=True),
        click.option("--workers", type=click.IntRange(1, 1024), help="Threads. Default: one a core."),
        click.option("--executor", type=click.Choice(["local", "ray"]), default="local", show_default=True),
        click.option("--ray-address", help="Ray cluster; default: the one at hand, or a new one here."),
        click.option("--strict", is_flag=True, help="Fail (4) where weights hold NaN or infinity."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("ckpt")
@click.argument("out")
@conversion_options
@click.option("--step", type=click.IntRange(0), help="Default: the newest committed one.")
@click.option("--overwrite", is_flag=True, help="Replace a finished version.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the plan from metadata alone, or what a run would refuse; read and write no weights.",
)
@JSON
def convert(ckpt: str, out: str, dry_run: bool, as_json: bool, **chosen: Any) -> None:
    """Convert the MaxText checkpoint CKPT into the version directory OUT.

    CKPT is a run, its checkpoints/, a step, or a step's items/; both may be gs://.
    """
    from mtx2vllm.converter.execute.memory import keep_freed_memory

    keep_freed_memory()
    from mtx2vllm.converter.conversion import Options, prepare
    from mtx2vllm.converter.conversion import convert as run

    if dry_run:
        from mtx2vllm.converter.commands.show import job_json, job_text
        from mtx2vllm.converter.conversion import refuse_out

        job = prepare(ckpt, Options(**chosen))
        refuse_out(job, out)
        click.echo(json.dumps(job_json(job, out)) if as_json else job_text(job, out))
        return
    from mtx2vllm.converter.commands.show import Bar, converted_text

    with Bar(enabled=sys.stderr.isatty()) as bar:
        try:
            done = run(ckpt, out, say=bar.say, progress=bar.update, **chosen)
        except KeyboardInterrupt:
            from mtx2vllm.converter.commands.show import interrupted_text

            bar.say(interrupted_text(out))
            sys.exit(130)
    click.echo(json.dumps(done.to_json()) if as_json else converted_text(done))


@click.command()
@click.option("--hf-config", required=True, help="config.json, a directory with one, or a Hub id.")
@LAYOUT
@DTYPE
@ROPE
@click.option("--scanned/--unscanned", default=True, show_default=True)
@JSON
@click.option("--full", is_flag=True, help="With --json: list every tensor and leaf.")
def plan(hf_config: str, as_json: bool, full: bool, **chosen: Any) -> None:
    """Show what a config will become; needs no checkpoint."""
    from mtx2vllm.converter.commands.show import plan_json, plan_text
    from mtx2vllm.converter.conversion import plan as make

    made = make(hf_config, **chosen)
    click.echo(json.dumps(plan_json(made, full=full)) if as_json else plan_text(made))


@click.command()
@click.argument("ckpt")
@click.option("--step", type=click.IntRange(0), help="Default: the newest committed one.")
@click.option("--allow-uncommitted", is_flag=True, help="Look at a step without its commit marker.")
@JSON
def inspect(ckpt: str, step: int | None, allow_uncommitted: bool, as_json: bool) -> None:
    """Show what a checkpoint is: tree, dtypes, shapes, chunks, steps, family. Reads no weights."""
    from mtx2vllm.converter.commands.show import inspect_json, inspect_text

    found = inspect_json(ckpt, step, allow_uncommitted)
    click.echo(json.dumps(found) if as_json else inspect_text(found))


@click.command()
@click.argument("out")
@click.option("--against", help="Compare bit by bit with another version or a plain Hugging Face directory.")
@JSON
def verify(out: str, against: str | None, as_json: bool) -> None:
    """Prove that the version OUT is what its manifest says."""
    from mtx2vllm.converter.commands.show import verification_text
    from mtx2vllm.converter.version.verify import verify_version

    found = verify_version(out, against)
    click.echo(json.dumps(found.to_json()) if as_json else verification_text(found, against))
    if not found.ok:
        sys.exit(4)


@click.command()
@click.argument("version")
@click.argument("directory")
@click.option("--config-only", is_flag=True, help="Only config, tokenizer and the like; no weights.")
def fetch(version: str, directory: str, config_only: bool) -> None:
    """Copy a version (or only its config) to a local DIRECTORY, verified; an interrupted copy resumes."""
    from mtx2vllm.converter.version.fetch import fetch_version

    click.echo(fetch_version(version, directory, config_only=config_only).sentence())
