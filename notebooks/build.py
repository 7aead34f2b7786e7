"""Make the notebooks from their scripts: ``python notebooks/build.py [--check]``.

The scripts (``*.py`` in jupytext's percent form) are what people edit; each ``.ipynb`` is its
script executed in an empty folder. Cell ids come from the sources, and times, paths and versions of
this machine stay out of the file, so that a rebuild changes only what the code changed. ``--check``
runs nothing: it says whether the notebooks are in step.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jupytext  # type: ignore[import-untyped]
import nbformat as _nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

nbformat: Any = _nbformat  # its annotations are not complete
NotebookNode: TypeAlias = Any  # a dict whose keys are attributes too

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MAX_BYTES = 300_000
TIMEOUT = 180  # seconds per cell

_PATH = re.compile(
    r"(?<![\w.:/])/(?:home|root|tmp|work|usr|opt|var|Users|mnt|private)/[\w.-]+|\b[A-Z]:\\[\w.-]+"
)
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def scripts() -> list[Path]:
    """The scripts, in the order of their numbers."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def read_script(script: Path) -> NotebookNode:
    """The notebook of a script, without outputs, with cell ids that depend on the sources alone."""
    book = jupytext.read(script, fmt="py:percent")
    book.metadata = nbformat.from_dict(_METADATA)
    book.nbformat, book.nbformat_minor = 4, 5
    used: set[str] = set()
    for cell in book.cells:
        n, name = 0, ""
        while not name or name in used:  # two equal cells still need two ids
            name = hashlib.sha256(f"{cell.cell_type}\n{cell.source}\n{n}".encode()).hexdigest()[:8]
            n += 1
        used.add(name)
        cell.id = name
        cell.metadata = nbformat.from_dict({})
    return book


@contextlib.contextmanager
def started_kernel() -> Iterator[Any]:
    """A kernel with this checkout's package and its command, which several notebooks may use in
    turn.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        kernel = KernelManager(kernel_name="python3")
        kernel.start_kernel(
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "PATH": programs, "IPYTHONDIR": folder},
        )
        try:
            yield kernel
        finally:
            kernel.shutdown_kernel(now=True)


def execute(book: NotebookNode, folder: Path, kernel: Any) -> NotebookNode:
    """Run ``book`` (in place) with ``folder`` as its working folder, in a kernel that is as new but
    for the modules that are loaded.

    Raises:
        CellExecutionError: a cell failed; its text is that cell and the traceback.
    """
    client = NotebookClient(book, km=kernel, timeout=TIMEOUT, record_timing=False)
    channels = kernel.blocking_client()
    channels.start_channels()
    try:
        channels.wait_for_ready(timeout=TIMEOUT)
        start = f"import os; os.chdir({str(folder)!r}); get_ipython().reset(new_session=True)"
        channels.execute_interactive(start, store_history=False, timeout=TIMEOUT)
    finally:
        channels.stop_channels()
    client.execute()
    book.metadata = nbformat.from_dict(_METADATA)
    for cell in book.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return book


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Streams that the kernel happened to send in pieces, as one."""
    joined: list[NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if output.output_type == "stream" and last is not None and last.get("name") == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def output_texts(book: NotebookNode) -> list[str]:
    """Everything in the outputs that is text."""
    texts: list[str] = []
    for cell in book.cells:
        for output in cell.get("outputs", []):
            texts += [str(output.get(key, "")) for key in ("text", "evalue")]
            texts += [
                str(v) for kind, v in output.get("data", {}).items() if kind.startswith("text/")
            ]
    return texts


def faults(book: NotebookNode, reference: NotebookNode) -> list[str]:
    """Why an executed notebook should not be published; ``reference`` is what its script gives.
    Empty if all is well.
    """
    found = []
    cells = [(c.cell_type, c.id, c.source) for c in book.cells]
    if cells != [(c.cell_type, c.id, c.source) for c in reference.cells]:
        found.append("its cells are not those of the script")
    code = [c for c in book.cells if c.cell_type == "code"]
    if [c.execution_count for c in code] != list(range(1, len(code) + 1)):
        found.append("it was not executed from top to bottom")
    outputs = [o for c in code for o in c.outputs]
    if any(o.output_type == "error" for o in outputs):
        found.append("a cell failed")
    if any(o.get("name") == "stderr" for o in outputs):
        found.append("something was written to stderr (a warning?)")
    for text in output_texts(book):
        leak = _PATH.search(text)
        machine = socket.gethostname()
        if leak:
            found.append(f"an output holds a path of one machine: {leak.group()}")
        elif len(machine) > 3 and machine in text:
            found.append(f"an output holds the name of a machine: {machine}")
    size = len(nbformat.writes(book).encode())
    if size > MAX_BYTES:
        found.append(f"it has {size:,} bytes, more than {MAX_BYTES:,}")
    return found


def check(script: Path) -> list[str]:
    """Faults of the notebook that lies beside ``script``."""
    notebook = script.with_suffix(".ipynb")
    if not notebook.is_file():
        return ["it is missing"]
    return faults(nbformat.read(notebook, as_version=4), read_script(script))


def build(script: Path, kernel: Any) -> list[str]:
    """Execute ``script`` and write the notebook beside it; nothing is written if it has faults,
    which are returned.
    """
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        try:
            book = execute(read_script(script), Path(folder), kernel)
        except CellExecutionError as error:
            return [f"a cell failed:\n{error}"]
    if found := faults(book, read_script(script)):
        return found
    notebook = script.with_suffix(".ipynb")
    temporary = notebook.with_name(f".{notebook.name}.tmp")
    temporary.write_text(nbformat.writes(book) + "\n", encoding="utf-8")
    os.replace(temporary, notebook)
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Build or check all notebooks; 0 if all is well."""
    parser = argparse.ArgumentParser(description="Make the notebooks from their scripts.")
    parser.add_argument(
        "--check", action="store_true", help="run nothing; fail if a notebook is out of step"
    )
    only_check = parser.parse_args(arguments).check
    failed = False
    for script in scripts():
        if only_check:
            found = check(script)
        else:
            with started_kernel() as kernel:
                found = build(script, kernel)
        failed |= bool(found)
        for fault in found:
            print(f"{script.with_suffix('.ipynb').name}: {fault}", file=sys.stderr)
        if not found:
            print(f"{script.with_suffix('.ipynb').name}: {'in step' if only_check else 'built'}")
    if failed and only_check:
        print("build them again: python notebooks/build.py", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
