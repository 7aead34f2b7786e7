"""Two stages: a model to an empty trained index, and codes (or features) to a filled one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss

from ..errors import DataError, MismatchError, UsageError
from ..files import read_json
from ..store import RowReader, codebooks_fingerprint
from .checks import Floats, check_codebooks, check_codes
from .codebooks import encode, inject
from .io import check_index_output, save_index
from .layout import repeated_id

Progress = Callable[[int, int], None]
"""Called with the items done and the items in all."""

BLOCK = 65_536


@dataclass(frozen=True)
class ModelHeader:
    """What an index needs to know of a model; the network's weights stay on disk.

    Attributes:
        folder: the model folder.
        codebooks: z', float32 [M, K, d], unit-norm.
        model_fingerprint: of all weights.
        codebooks_fingerprint: of the codebooks, recomputed.
        document: ``config.json``, whole.
    """

    folder: Path
    codebooks: Floats
    model_fingerprint: str
    codebooks_fingerprint: str
    document: dict[str, Any]


def read_model(model_dir: str | Path) -> ModelHeader:
    """Read codebooks and fingerprints of a model folder, without torch.

    Raises:
        DataError: a file is missing, damaged or foreign, or the codebooks are unfit for Faiss.
        MismatchError: the weights are not those that ``config.json`` describes.
    """
    folder = Path(model_dir)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a model folder: pass the --out of 'gpq train'")
    document = read_json(folder / "config.json", "a model's settings")
    keys = ("model_fingerprint", "codebooks_fingerprint")
    if not isinstance(document, dict) or not all(isinstance(document.get(key), str) for key in keys):
        raise DataError(
            f"{folder / 'config.json'} is not the description of a GPQ model: it is damaged or foreign"
        )
    if document.get("format_version") != 1:
        raise DataError(
            f"{folder / 'config.json'}: format {document.get('format_version')!r}, this version reads 1: train again"
        )
    path = folder / "model.safetensors"
    Z = check_codebooks(_read_tensor(path, "codebooks"), what=f"codebooks of {path}")
    found = codebooks_fingerprint(Z)
    if found != document["codebooks_fingerprint"]:
        raise MismatchError(
            f"{path}: its codebooks are not those of config.json: copy the whole model folder again"
        )
    return ModelHeader(folder, Z, document["model_fingerprint"], found, document)


def read_model_codebooks(model_dir: str | Path) -> tuple[Floats, dict[str, Any]]:
    """Codebooks float32 [M, K, d] and ``config.json`` of a model folder. Raises as :func:`read_model`."""
    model = read_model(model_dir)
    return model.codebooks, model.document


def _read_tensor(path: Path, name: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as tensors:
            if name not in tensors.keys():  # noqa: SIM118  (it is no dict)
                raise DataError(f"{path} holds no {name!r}: it is not the model of a GPQ training")
            return tensors.get_tensor(name)
    except FileNotFoundError:
        raise DataError(f"{path} not found: the model folder is incomplete, train it again") from None
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        why = " ".join(str(error).split())[:120]
        raise DataError(f"{path} is damaged ({why}): copy or train the model again") from None


def export_faiss(model_dir: str | Path, out: str | Path, *, overwrite: bool = False) -> Path:
    """Write a model's codebooks as an empty, trained ``faiss.IndexPQ`` (inner product), ready for ``add``.

    Any program with Faiss uses it without this package. Vectors added to it must be the model's own
    (intra-normalised); query vectors may have any scale.

    Args:
        model_dir: a model folder.
        out: the index file; ``out + ".json"`` gets its fingerprints.
        overwrite: replace existing files.

    Returns:
        ``out``

    Raises:
        DataError, MismatchError: see :func:`read_model`.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    out = check_index_output(out, overwrite=overwrite)
    model = read_model(model_dir)
    return save_index(inject(model.codebooks), out, model_fingerprint=model.model_fingerprint, overwrite=True)


def index(
    model_dir: str | Path,
    source: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    block: int = BLOCK,
    progress: Progress | None = None,
) -> Path:
    """Write codes (or features, which are encoded on the way) as a searchable index with the user's own ids.

    The result is an ``IndexIDMap2`` around an ``IndexPQ``. Rows stream in ``block`` at a time: memory beyond the
    index itself is bounded.

    Args:
        model_dir: the model that the rows are of.
        source: ``codes.h5`` or ``features.h5``.
        out: the index file; ``out + ".json"`` gets its fingerprints.
        overwrite: replace existing files.
        block: rows at a time.
        progress: called after each block.

    Returns:
        ``out``

    Raises:
        DataError: the model or the source is damaged, or an id occurs twice.
        MismatchError: the rows are of another model.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if block < 1:
        raise UsageError(f"block of {block} rows: it must be at least 1")
    if Path(out).resolve() == Path(source).resolve():
        raise UsageError(f"{out} is the source itself: choose another output")
    out = check_index_output(out, overwrite=overwrite)
    model = read_model(model_dir)
    M, K, _ = model.codebooks.shape
    with RowReader(source) as reader:
        header = reader.header
        if header.model_fingerprint != model.model_fingerprint:
            raise MismatchError(
                f"{source} is of model {header.model_fingerprint}, not of {model.folder} ({model.model_fingerprint}): "
                "encode the data again with this model"
            )
        if codebooks_fingerprint(header.codebooks) != model.codebooks_fingerprint:
            raise MismatchError(
                f"{source} was made with other codebooks than those of {model.folder}: encode it again"
            )
        n = reader.ntotal
        # The ids alone first: an index holds them in memory anyway, and a repeated one should not cost the encoding.
        repeated = repeated_id(reader.ids(0, n))
        if repeated is not None:
            raise DataError(f"{source}: id {repeated} occurs more than once: every item needs its own")
        # The index is filled through C++ (no copy of the whole in Python).
        filled = faiss.IndexIDMap2(inject(model.codebooks))
        for start in range(0, n, block):
            stop = min(n, start + block)
            values = reader.block(start, stop)
            if header.kind == "features":
                codes = encode(values, model.codebooks, what=str(source), first_row=start)
            else:
                codes = check_codes(values, M, K, what=str(source))
            filled.add_sa_codes(codes, reader.ids(start, stop))
            if progress is not None:
                progress(stop, n)
        extra = {"source": header.kind, "data_fingerprint": header.data_fingerprint}
    return save_index(filled, out, model_fingerprint=model.model_fingerprint, overwrite=True, extra=extra)
