"""The names that users import, in every order of imports (a submodule of the same name would hide them)."""

import subprocess
import sys

import pytest

NAMES = "from mtx2vllm.converter import Converted, Options, convert, plan; assert callable(convert) and callable(plan)"


@pytest.mark.parametrize("before", ["", "import mtx2vllm.converter.cli; import mtx2vllm.converter.conversion; "])
def test_convert_and_plan_are_functions(before: str) -> None:
    subprocess.run([sys.executable, "-c", before + NAMES], check=True)


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, mtx2vllm.converter, mtx2vllm.reload; assert not {'numpy', 'jax', 'click'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
