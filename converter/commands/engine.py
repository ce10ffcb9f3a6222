"""validate and doctor: what concerns the engine. vLLM is imported only when they run."""

import json
import sys
from typing import Any

import click

from mtx2vllm.converter.commands.convert import JSON


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("version")
@click.option("--prompt", help="Text to generate from (needs a tokenizer in VERSION).")
@click.option("--token-ids", help="Token ids to generate from. Default: 1,2,3.")
@click.option("--against", help="Hugging Face directory: compare state, tokens and log-probabilities with it.")
@JSON
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
def validate(version: str, engine_args: tuple[str, ...], as_json: bool, **chosen: Any) -> None:
    """Push VERSION into the installed vLLM, started with random weights, and generate.

    Everything after -- goes to the engine untouched.
    """
    from mtx2vllm.reload.validate import validate as run

    if chosen["prompt"] is None and chosen["token_ids"] is None:
        click.echo("neither --prompt nor --token-ids: generating from token ids 1,2,3", err=True)
        chosen["token_ids"] = "1,2,3"
    found = run(version, engine_args, **chosen)
    click.echo(json.dumps(found.to_json()) if as_json else found.text())
    if not found.ok:
        sys.exit(4)


@click.command()
@click.argument("root", required=False)
@JSON
def doctor(root: str | None, as_json: bool) -> None:
    """Say what is set, what the installed engine offers, and with ROOT whether it can be read, written and watched."""
    from mtx2vllm.reload.doctor import examine

    found = examine(root)
    click.echo(json.dumps(found.to_json()) if as_json else found.text())
    if not found.ok:
        sys.exit(3)
