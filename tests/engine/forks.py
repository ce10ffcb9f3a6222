"""Engine processes without their imports: `python -m engine.forks` imports vLLM and JAX once, then forks a scenario for
each line it is sent. Imports are a minute of every engine process's life; JAX has no backend yet when it forks, so each
child still chooses its own number of devices.

A line on stdin: {"arguments": [...], "log": path}. A line on stdout: the exit status.
"""

import json
import os
import sys
import traceback
from importlib import import_module
from typing import Any

from . import cpu_backend


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    flags = os.environ.get("XLA_FLAGS", "")
    cpu_backend.set_environment(1)
    os.environ["XLA_FLAGS"] = flags  # the number of devices is a child's own
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    cpu_backend.install()
    _import()
    for line in sys.stdin:
        print(_run(json.loads(line)), file=answers, flush=True)


def _import() -> None:
    for name in ("tpu_inference.runner.tpu_runner", "tpu_inference.worker.tpu_worker", "vllm.v1.engine.llm_engine"):
        import_module(name)


def _run(job: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        log = os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from . import scenario

        scenario.main(job["arguments"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
