"""A test in a small process of its own, where forks take a tenth of the time that they take where
torch is loaded.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Decorator; the module of the test must load little."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        if os.environ.get("GPQ_ALONE") == name:
            test(*args, **options)
            return
        call = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--noconftest",
            "--disable-plugin-autoload",
            name,
        ]
        environment = {**os.environ, "GPQ_ALONE": name, "PYTEST_ADDOPTS": "-p no:cacheprovider"}
        completed = subprocess.run(
            call, capture_output=True, text=True, env=environment, check=False
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr

    return run
