"""Two stages: a model to an empty trained index, and codes (or features) to a filled one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from ..errors import DataError, MismatchError, UsageError
from ..files import read_json
from ..inputs import check_file, check_memory
from ..stages import stage
from ..store import RowReader, codebooks_fingerprint
from .checks import Floats, check_codebooks, check_recall, code_size
from .codebooks import inject, items_are_codewords
from .disk import open_disk
from .engine import Engine
from .io import check_index_output, save_index
from .ivf import IvfSettings
from .kinds import Kind, check_kind
from .layout import repeated_id
from .liststream import build_lists, store_nprobe
from .rowfile import RowForm
from .shards import Hdf5Shard, Shard, is_index, is_parquet, open_shard, parse_bytes
from .stream import MEMORY as STREAM_MEMORY
from .stream import build_stream
from .tune import tune_nprobe

Progress = Callable[[int, int], None]
"""Called with the items done and the items in all."""

BLOCK = 65_536
_TUNING = 256 << 20  # what tuning takes at least, for some hundred queries
_log = logging.getLogger(__name__)
_PROTOTYPES = "network.classifier.raw"
_ITEM_PROTOTYPES = "network.prototypes"


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

    @property
    def codewords(self) -> bool:
        """Whether an item's vector is the codewords of its code."""
        return items_are_codewords(self.document)

    @property
    def asymmetric(self) -> bool:
        """Whether queries have vectors of their own."""
        return self.document.get("asymmetric") is True

    def tell(self) -> dict[str, Any]:
        """For what is exported: says in the log, and returns for the file, that queries have vectors of their own."""
        if not self.asymmetric:
            return {}
        _log.info(
            "%s makes other vectors of queries than of items: add those of items (gpq encode, Encoder.embed) and search "
            "with those of queries (Encoder.embed with queries=True, gpq export-encoder); no other program can tell them apart",
            self.folder,
        )
        return {"asymmetric": True}


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

    if not path.exists():
        raise DataError(f"{path} not found: the model folder is incomplete, train it again")
    check_file(path, "the weights of a model")
    try:
        with safe_open(path, framework="numpy") as tensors:
            if name not in tensors.keys():  # noqa: SIM118  (it is no dict)
                raise DataError(f"{path} holds no {name!r}: it is not the model of a GPQ training")
            return tensors.get_tensor(name)
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        why = " ".join(str(error).split())[:120]
        raise DataError(f"{path} is damaged ({why}): copy or train the model again") from None


def read_prototypes(model_dir: str | Path) -> Floats:
    """The model's class prototypes as coarse centroids: float32 [C, M*d], each sub-vector of unit norm.

    They are the sub-prototypes W of the cosine classifier (eq. 3), one centroid a class; of a model with a committee the query
    vectors of items that are surely of a class.

    Raises:
        DataError: see :func:`read_model`; a model without such a classifier.
        MismatchError: see :func:`read_model`.
    """
    model = read_model(model_dir)
    name = _ITEM_PROTOTYPES if model.asymmetric else _PROTOTYPES
    W = np.asarray(_read_tensor(model.folder / "model.safetensors", name))
    M, _, d = model.codebooks.shape
    if W.dtype != np.float32 or W.ndim != 3 or W.shape[0] != M or W.shape[2] != d or not np.isfinite(W).all():
        raise DataError(
            f"{model.folder}: its sub-prototypes are {W.dtype} {W.shape}, not finite float32 [{M}, classes, {d}]"
        )
    norms = np.linalg.norm(W, axis=2, keepdims=True)
    unit = W / np.maximum(norms, np.finfo(np.float32).tiny)
    return np.ascontiguousarray(unit.transpose(1, 0, 2).reshape(W.shape[1], M * d), dtype=np.float32)


def export_faiss(model_dir: str | Path, out: str | Path, *, overwrite: bool = False) -> Path:
    """Write a model's codebooks as an empty, trained ``faiss.IndexPQ`` (inner product), ready for ``add``.

    Any program with Faiss uses it without this package. Vectors added to it must be the model's own of items
    (intra-normalised); query vectors may have any scale. Where queries have vectors of their own, the log says so, and the
    sidecar (``asymmetric`` in ``extra``).

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
    empty, name = inject(model.codebooks), model.model_fingerprint
    return save_index(empty, out, model_fingerprint=name, overwrite=True, extra=model.tell())


def index(
    model_dir: str | Path,
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    kind: Kind = "flat",
    memory: str | int | None = None,
    ivf: IvfSettings | None = None,
    recall: float | None = None,
    overwrite: bool = False,
    block: int = BLOCK,
    progress: Progress | None = None,
) -> Path:
    """Write codes (or features, which are encoded on the way) as a searchable index with the user's own ids.

    By default the result is an ``IndexIDMap2`` around an ``IndexPQ``, made in memory. With ``memory``, several sources
    or another kind, rows stream through files (:func:`.stream.build_stream`): the build is resumable by source and keeps
    to the budget, and the id map is an ``IndexIDMap`` (none where ids are 0, 1, 2, ...), whose reading takes no table of
    ids. ``exact``, ``grouped`` and ``auto`` are flat files that the sidecar says how to open. ``ivf`` streams where
    ``memory`` is given (:func:`.liststream.build_lists`), and is made in memory otherwise.

    Args:
        model_dir: the model that the rows are of.
        source: ``codes.h5``, ``features.h5``, Parquet with columns ``codes`` and ``id``, or an index file of any form
            (which is so converted); several are shards of one index (and index files are so merged).
        out: the index file; ``out + ".json"`` gets its fingerprints.
        kind: see :data:`.kinds.KINDS`.
        memory: for the arrays of the build: bytes, or ``"2GB"``.
        ivf: for ``ivf``: how lists are made.
        recall: for ``ivf``: choose nprobe for this recall of the top 10 (:func:`.tune.tune_nprobe`; by stand-ins for
            queries, drawn from the items).
        overwrite: replace existing files.
        block: rows at a time (without ``memory``).
        progress: called after each block.

    Returns:
        ``out``

    Raises:
        DataError: the model or a source is damaged, features are not those of items, or an id occurs twice.
        MismatchError: the rows are of another model.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
        UsageError: an unknown kind, settings of another kind, or a budget that is too small.
    """
    if block < 1:
        raise UsageError(f"block of {block} rows: it must be at least 1")
    sources = [source] if isinstance(source, str | Path) else list(source)
    if not sources:
        raise UsageError("nothing to index: name at least one file of codes or features")
    if any(Path(out).resolve() == Path(path).resolve() for path in sources):
        raise UsageError(f"{out} is the source itself: choose another output")
    if kind != "ivf" and (ivf is not None or recall is not None):
        raise UsageError(f"lists and recall belong to kind 'ivf', not to {kind!r}")
    if recall is not None:
        check_recall(recall)
    if ivf is not None:
        ivf.check()
    out = check_index_output(out, overwrite=overwrite)
    model = read_model(model_dir)
    check_kind(kind, int(model.codebooks.shape[1]))
    budget = None if memory is None else parse_bytes(memory)
    rows = not any(is_parquet(path) or is_index(path) for path in sources)
    if kind == "flat" and budget is None and len(sources) == 1 and rows:
        return _flat(model, sources[0], out, block, progress)
    shards = [
        open_shard(
            path, model.codebooks, model.model_fingerprint, str(model.folder), codewords=model.codewords
        )
        for path in sources
    ]
    if kind == "ivf" and budget is None:
        return _lists(model, shards, out, ivf, recall, block, progress)
    extra = _origin(shards[0])
    if kind == "ivf":
        assert budget is not None
        wanted, tuning = recall, max(budget, _TUNING)

        def tune(path: Path) -> None:
            if wanted is not None:
                with stage("tuning nprobe"), open_disk(path, tuning) as engine:
                    engine.tune(wanted, k=min(10, engine.ntotal))
                store_nprobe(path, engine.nprobe, engine.points)

        return build_lists(
            shards,
            out,
            model.codebooks,
            ivf,
            model_fingerprint=model.model_fingerprint,
            memory=budget,
            overwrite=True,
            extra=extra,
            finish=tune,
            progress=progress,
        )
    if kind not in ("flat", "auto"):
        extra["engine"] = kind
    M = int(model.codebooks.shape[0])
    form: RowForm = "fastscan" if kind == "fastscan" else "fused" if kind == "fused" and M > 1 else "flat"
    return build_stream(
        shards,
        out,
        model.codebooks,
        form,
        model_fingerprint=model.model_fingerprint,
        memory=budget or STREAM_MEMORY,
        overwrite=True,
        extra=extra,
        progress=progress,
    )


def _origin(source: Shard) -> dict[str, str]:
    """For the sidecar: what the index was made of, and of which data, where the source names them."""
    named = {"data_fingerprint": source.data_fingerprint} if source.data_fingerprint else {}
    return {"source": source.kind, **named}


def _lists(
    model: ModelHeader,
    shards: Sequence[Shard],
    out: Path,
    ivf: IvfSettings | None,
    recall: float | None,
    block: int,
    progress: Progress | None,
) -> Path:
    """An index with lists, made in memory. Raises as :func:`index`."""
    total = sum(shard.rows for shard in shards)
    M, K, _ = (int(n) for n in model.codebooks.shape)
    check_memory(total * (code_size(M, K) + 8), f"{total:,} codes", remedy="give --memory")
    codes = np.empty((total, code_size(M, K)), np.uint8)
    ids = np.empty(total, np.int64)
    at = 0
    with stage("reading codes", total, "row") as reading:
        for shard in shards:
            for part, own in shard.blocks(block):
                codes[at : at + len(part)], ids[at : at + len(part)] = part, own
                at += len(part)
                reading.done = at
                if progress is not None:
                    progress(at, total)
    with stage("making lists"):
        engine = Engine.build(
            codes, model.codebooks, ids, kind="ivf", ivf=ivf, model_fingerprint=model.model_fingerprint
        )
    if recall is not None:
        with stage("tuning nprobe"):
            tune_nprobe(engine, recall, k=min(10, total))
    with stage("writing the index"):
        return engine.save(out, overwrite=True)


def _flat(model: ModelHeader, source: str | Path, out: Path, block: int, progress: Progress | None) -> Path:
    """The plain form, made in memory. Raises as :func:`index`."""
    shard = Hdf5Shard(
        source, model.codebooks, model.model_fingerprint, str(model.folder), codewords=model.codewords
    )
    with RowReader(source) as reader:
        # The ids alone first: an index holds them in memory anyway, and a repeated one should not cost the encoding.
        repeated = repeated_id(reader.ids())
    if repeated is not None:
        raise DataError(f"{source}: id {repeated} occurs more than once: every item needs its own")
    # The index is filled through C++ (no copy of the whole in Python).
    filled = faiss.IndexIDMap2(inject(model.codebooks))
    with stage("indexing", shard.rows, "row") as indexing:
        for codes, ids in shard.blocks(block):
            filled.add_sa_codes(codes, ids)
            indexing.advance(len(ids))
            if progress is not None:
                progress(indexing.done, shard.rows)
    extra = _origin(shard)
    with stage("writing the index"):
        return save_index(filled, out, model_fingerprint=model.model_fingerprint, overwrite=True, extra=extra)
