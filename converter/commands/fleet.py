"""follow, batch, adopt, versions, pin, unpin, prune."""

import json
import math
import sys
from typing import Any

import click

from mtx2vllm.converter.commands.convert import JSON, conversion_options


class Seconds(click.FloatRange):
    """A range of real numbers: `nan` compares as false with every bound, and click lets it through."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See click.ParamType.convert."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return found


class Step(click.ParamType[int]):
    """The number of a version."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if not (value.isascii() and value.isdigit()):
            self.fail(
                f"{value!r} is not a step; give the number of a version, as `mtx2vllm versions` shows it", param, ctx
            )
        return int(value)


@click.command()
@click.argument("run")
@click.argument("root")
@conversion_options
@click.option("--every", type=click.IntRange(1), help="Convert each step that N divides. Default: only what is newest.")
@click.option("--all", "every_step", is_flag=True, help="Convert every step, newest first.")
@click.option("--poll", type=Seconds(0.05, 3600), help="Seconds between two looks. Default: 1, gs:// 5.")
@click.option("--no-wait", is_flag=True, help="Exit (3) where another follower writes into ROOT. Default: stand by.")
@click.option("--grace", type=Seconds(0), default=20.0, show_default=True,
              help="Seconds that a conversion may go on after SIGTERM before it is abandoned.")  # fmt: skip
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Serve /metrics and /healthz. Default: off. 0: a free port."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 in a container.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def follow(
    run: str, root: str, every: int | None, every_step: bool, poll: float | None, no_wait: bool, grace: float,
    port: int | None, host: str, log_format: str, **chosen: Any,
) -> None:  # fmt: skip
    """Convert each newly committed step of the run RUN into ROOT/<step>/, until SIGTERM.

    RUN need not exist yet. When several steps wait, the newest comes first, and without --every or --all the older
    ones are skipped.
    """
    if every and every_step:
        raise click.UsageError("--every and --all cannot be given together: --all is --every 1")
    from mtx2vllm.converter.execute.memory import keep_freed_memory

    keep_freed_memory()
    from mtx2vllm.converter.conversion import Options
    from mtx2vllm.converter.fleet import follow_log, follow_run
    from mtx2vllm.converter.fleet.follow import Following

    follow_log.configure(log_format)
    following = Following(
        run, root, Options(**chosen), every=1 if every_step else every, poll=poll, wait=not no_wait, grace=grace
    )
    follow_run.main(following, host, port)


for _option in follow.params:
    if isinstance(_option, click.Option) and _option.help:
        _option.help = _option.help.replace("CKPT", "RUN")  # the options are convert's, the argument is not


@click.command()
@click.argument("jobs")
@JSON
def batch(jobs: str, as_json: bool) -> None:
    """Carry out the conversions that the YAML file JOBS describes; what is done already is skipped.

    Everything is checked before anything runs. Exit status: 0 all done, 1 a job failed, 3 the file is bad.
    """
    from mtx2vllm.converter.execute.memory import keep_freed_memory

    keep_freed_memory()
    from mtx2vllm.converter.commands.show import Bar
    from mtx2vllm.converter.commands.show_fleet import batch_text
    from mtx2vllm.converter.fleet.batch import run_batch

    with Bar(enabled=sys.stderr.isatty()) as bar:
        outcomes = run_batch(jobs, say=bar.say, progress=bar.update)
    ok = all(o.ok for o in outcomes)
    click.echo(json.dumps({"ok": ok, "jobs": [o.to_json() for o in outcomes]}) if as_json else batch_text(outcomes))
    if not ok:
        sys.exit(1)


@click.command()
@click.argument("hf_dir")
@click.option(
    "--as",
    "out",
    metavar="ROOT/STEP",
    help="Copy the files there; shards are hard-linked on the same disk. Default: the manifest goes into HF_DIR.",
)
@click.option("--copy", is_flag=True, help="With --as: copy the shards, too.")
@JSON
def adopt(hf_dir: str, out: str | None, copy: bool, as_json: bool) -> None:
    """Write a manifest for a Hugging Face directory that some other trainer wrote, after checking it whole.

    Its users then have hot reload and verification, too. Nothing is moved. With --as, HF_DIR's shards may afterwards be
    removed or replaced by new files (so does safetensors from 0.8 on), but not rewritten in place (older ones do): linked
    shards share their bytes. --copy is for the latter.
    """
    from mtx2vllm.converter.commands.show import Bar
    from mtx2vllm.converter.version.adopt import adopt as run

    with Bar(enabled=sys.stderr.isatty()) as bar:
        done = run(hf_dir, out, copy=copy, progress=bar.update)
        for note in done.notes:
            bar.say(note)
    click.echo(json.dumps(done.to_json()) if as_json else done.sentence())


@click.command()
@click.argument("root")
@JSON
def versions(root: str, as_json: bool) -> None:
    """Show the versions of ROOT, and which replicas serve which."""
    from mtx2vllm.converter.commands.show_fleet import versions_text
    from mtx2vllm.converter.fleet.versions import list_versions

    fleet = list_versions(root)
    click.echo(json.dumps(fleet.to_json()) if as_json else versions_text(fleet))


@click.command()
@click.argument("root")
@click.argument("step", type=Step())
def pin(root: str, step: int) -> None:
    """Make every replica of ROOT serve version STEP, within one poll interval, until `unpin`."""
    from mtx2vllm.converter.fleet.versions import pin as run

    run(root, step)
    click.echo(f"{root} is pinned to {step}")


@click.command()
@click.argument("root")
def unpin(root: str) -> None:
    """Let the replicas of ROOT follow their policy again."""
    from mtx2vllm.converter.fleet.versions import unpin as run

    was = run(root)
    click.echo(f"{root} is not pinned" if was is None else f"{root} is no longer pinned (was {was})")


@click.command()
@click.argument("root")
@click.option("--keep", type=click.IntRange(1), required=True, help="How many of the newest versions stay in any case.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@JSON
def prune(root: str, keep: int, dry_run: bool, as_json: bool) -> None:
    """Remove old versions of ROOT; never one that is newest, pinned, served by a live replica, or being written.

    Files that mtx2vllm did not write are never removed.
    """
    from mtx2vllm.converter.commands.show_fleet import pruned_text
    from mtx2vllm.converter.fleet.versions import prune as run

    pruned = run(root, keep, dry_run)
    click.echo(json.dumps(pruned.to_json()) if as_json else pruned_text(pruned))
