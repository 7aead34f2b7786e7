"""From a model to an empty, trained Faiss index."""

from __future__ import annotations

from pathlib import Path

from ..codes.codebooks import inject
from ..faissio.io import check_index_output, save_index
from ..faissio.model import read_model


def export_faiss(model_dir: str | Path, out: str | Path, *, overwrite: bool = False) -> Path:
    """Write a model's codebooks as an empty, trained ``faiss.IndexPQ`` (inner product), ready for ``add``.

    Faiss can use it without this package. Add only item vectors of the model (intra-normalised); query vectors may have any scale. If query
    and item vectors differ, the log and the sidecar (``asymmetric`` in ``extra``) tell.

    Args:
        model_dir: a model folder.
        out: the index file; its sidecar is ``out + ".json"``.
        overwrite: replace existing files.

    Returns:
        ``out``

    Raises:
        DataError, MismatchError: see :func:`read_model`.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    out = check_index_output(out, overwrite=overwrite)
    model = read_model(model_dir)
    empty, name = inject(model.codebooks), model.model_fingerprint
    return save_index(empty, out, model_fingerprint=name, overwrite=True, extra=model.query_note())
