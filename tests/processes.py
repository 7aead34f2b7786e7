"""``gpq`` in other processes, forks of one that has imported torch: an import takes two seconds."""

import multiprocessing
import os
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["gpq_faiss.stages.train", "gpq_faiss.serve.run", "sklearn.datasets", "torch._dynamo"]
)


class Command(FORKS.Process):
    """``gpq ARGUMENTS`` with more environment variables; its outputs go to files in a folder."""

    def __init__(self, *arguments: object, folder: Path, **variables: str) -> None:
        super().__init__(daemon=True)
        self.arguments, self.variables = list(map(str, arguments)), variables
        self.outputs = [folder / f"{name} of {id(self)}" for name in ("stdout", "stderr")]
        self.start()

    def run(self) -> None:
        from gpq_cli.main import cli

        os.environ.update(self.variables)
        for number, path in enumerate(self.outputs, 1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
        cli(self.arguments, prog_name="gpq")

    def ended(self) -> tuple[int | None, str, str]:
        """Wait for the end, and return exit code, stdout and stderr."""
        self.join(120)
        stdout, stderr = (path.read_text() for path in self.outputs)
        return self.exitcode, stdout, stderr
