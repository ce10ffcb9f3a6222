"""`mtx2vllm` on the CPU backend: `python -m engine.cli validate VERSION ... -- ENGINE ARGS`."""

import os

from . import cpu_backend

cpu_backend.set_environment(int(os.environ.get("ENGINE_DEVICES", "1")))
cpu_backend.install()

if __name__ == "__main__":
    from mtx2vllm.converter.cli import main

    main()
