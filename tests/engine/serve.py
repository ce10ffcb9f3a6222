"""`vllm serve` on the CPU: `python -m engine.serve MODEL [ARGS]`, with the number of devices in ENGINE_DEVICES.

The patches are applied when this module is imported, which a spawned engine core does first.
"""

import os

from . import cpu_backend

cpu_backend.set_environment(int(os.environ.get("ENGINE_DEVICES", "1")))
cpu_backend.install()


def main() -> None:
    import sys

    from vllm.entrypoints.cli.main import main as vllm
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # saves a start of Python for each new architecture
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    vllm()


if __name__ == "__main__":
    main()
