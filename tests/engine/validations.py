"""`validate`, several times in one engine process: `python -m engine.validations HOME OUT`. Facts only; tests judge."""

import json
import sys
from pathlib import Path
from typing import Any

from data_files import DATA

from . import cpu_backend

ARGUMENTS = ("--max-model-len", "128", "--max-num-batched-tokens", "64", "--max-num-seqs=4")
ADDITIONAL = {"sharding": {"sharding_strategy": {"tensor_parallelism": 1}}}


def main() -> None:
    home, out = map(Path, sys.argv[1:])
    cpu_backend.set_environment(1)
    cpu_backend.install()
    from mtx2vllm.reload.engines import trial
    from mtx2vllm.reload.validate import validate

    def tried(version: str, *more: str, **options: Any) -> dict[str, Any]:
        try:
            found = validate(str(home / version), (*ARGUMENTS, *more), **options)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"json": found.to_json(), "text": found.text()}

    hf = str(DATA / "qwen3/hf")
    parsed = trial._parse(hf, "dummy", [*ARGUMENTS, "--additional-config", json.dumps(ADDITIONAL)], tokenizer=False)
    report = {
        "argument": tried("qwen3", "--no-such-thing"),
        "start": tried("qwen3", "--max-num-seqs", "0"),
        "additional_config": parsed.additional_config,
        "same": tried("qwen3", token_ids="5,6,7", against=hf),
        "other": tried("qwen3", against=str(DATA / "trained/qwen3-scanned/maxtext_hf_step3")),
        "prompt": tried("qwen3", "--tokenizer", str(DATA / "tokenizer"), prompt="Hello"),
        "misfit": tried("misfit"),
    }
    out.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
