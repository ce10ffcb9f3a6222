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


def test_the_version_is_the_package_s_and_costs_nothing_before() -> None:
    code = (
        "import sys, mtx2vllm\n"
        "assert not {'importlib.metadata', 'numpy', 'jax', 'click'} & set(sys.modules)\n"
        "from importlib.metadata import version\n"
        "assert mtx2vllm.__version__ == version('mtx2vllm') and '__version__' in dir(mtx2vllm)\n"
        "try: mtx2vllm.nonsense\nexcept AttributeError: pass\nelse: raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"], check=True)
