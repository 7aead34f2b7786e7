"""Encoding on a Ray cluster: images or embeddings ─► codes-*.h5, which ``gpq index`` merges."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ..data.base import Dataset
from ..data.open import open_data
from ..encoder import Encoder
from ..errors import DataError, GpqError, MismatchError, UsageError, one_line, optional
from ..evaluation.ranking import usable_cores
from ..files import check_output, fingerprint
from ..progress import levels
from ..stages.encode import encode_rows, make_header
from ..store.rows import RowReader, RowWriter

log = logging.getLogger(__name__)

LOCAL = "local"
"""Address of a temporary cluster on this machine, which other machines cannot reach."""


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster for :func:`encode_on_ray`.

    Attributes:
        address: ``local`` (this machine), ``auto`` (the cluster running here), or ``HOST:PORT``.
        workers: maximum number of workers; 0: one per GPU, or without GPUs one per core.
        shard_items: items in a file of codes, rounded up to whole batches.
    """

    address: str = LOCAL
    workers: int = 0
    shard_items: int = 100_000


def encode_on_ray(
    model: str | Path,
    data: str | Callable[[], Dataset],
    out: str | Path,
    cluster: RayCluster,
    *,
    device: str = "cpu",
    batch_size: int = 0,
    amp: bool = False,
    overwrite: bool = False,
) -> list[Path]:
    """Encode ``data`` on a Ray cluster, whose nodes see the same files under the same paths.

    The codes are those of :func:`encode`. Shards of the same model and data are kept, so an
    interrupted run is continued.

    Args:
        model, device, batch_size, amp: as for :func:`encode`.
        data: the DATA name, or a function that opens the data on a node, such as a
            ``functools.partial`` of :func:`gpq_faiss.open_data`.
        out: folder for the shards, ``codes-*.h5``.
        cluster: where to run.
        overwrite: encode all shards again.

    Returns:
        The shards, in the order of the items.

    Raises:
        DataError: unreadable items beyond the limit, no cluster, or as :func:`encode`.
        MismatchError: data that do not fit the model, or other data on a node.
        UsageError: options out of range; Ray is not installed.
    """
    if min(batch_size, cluster.workers) < 0 or cluster.shard_items < 1:
        raise UsageError("--batch-size, workers and shard_items must be positive")
    opening = data if callable(data) else partial(open_data, data)
    # On the CPU: this process looks at the data only, and may have no GPU.
    encoder, dataset = Encoder.load(model, amp=amp), opening()
    encoder.check(dataset)
    size, n = batch_size or encoder.batch_size, len(dataset)
    step = -(-cluster.shard_items // size) * size
    folder = check_output(Path(out).resolve() / "codes.h5", overwrite=True).parent
    for path in folder.glob("codes-*.h5") if overwrite else ():
        path.unlink()
    shards = [
        {"path": f"{folder}/codes-{start:012}.h5", "start": start, "stop": min(start + step, n)}
        for start in range(0, n, step)
    ]
    with connected(cluster.address) as ray, levels(logging.ERROR, "ray", "ray.data"):
        ray.data.DataContext.get_current().enable_progress_bars = False
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0)) if device != "cpu" else 0
        if device.startswith("cuda") and not gpus:
            raise UsageError(f"the cluster at {cluster.address} has no GPU: use --device cpu")
        options = {
            "folder": os.getcwd(),
            "model": (model, "cuda" if gpus else "cpu", amp),
            "opening": opening,
            "fingerprints": (encoder.fingerprint, dataset.fingerprint),
            "batch_size": size,
        }
        workers = min(cluster.workers or gpus or int(resources["CPU"]), len(shards))
        rows = ray.data.from_items(shards, override_num_blocks=len(shards)).map_batches(
            _ShardEncoder,
            fn_constructor_kwargs=options,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=workers),
            num_cpus=1,
            num_gpus=int(gpus > 0),
        )
        unreadable = n
        for row in rows.iter_rows():
            if row["error"]:
                raise DataError(row["error"])
            log.info("%s is written", row["path"])
            unreadable -= row["rows"]
    message = f"{unreadable:,} of {n:,} images cannot be read"
    if unreadable > dataset.max_bad * n:
        raise DataError(f"{message}: repair them, or raise --read max_bad")
    if unreadable:
        log.warning("%s, and were left out", message)
    return [Path(str(shard["path"])) for shard in shards]


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect to a Ray cluster for a block, and yield the module ``ray``.

    If Ray is connected already, that connection is used, and the address is ignored.

    Raises:
        UsageError: Ray is not installed.
        DataError: no cluster responds.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads it on import
    ray = optional("ray", "the package ray is missing: pip install 'gpq-faiss[ray]'")
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    # By default Ray (tried with 2.52) listens on all interfaces, also where its cluster is this
    # machine.
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = address != LOCAL
    if address == LOCAL:
        options |= {"include_dashboard": False, "num_cpus": usable_cores()}
    try:
        ray.init(address, **options)
        yield ray
    except GpqError:
        raise
    except Exception as error:  # Ray raises a bare Exception if its processes do not start in time
        raise DataError(
            f"the Ray cluster at {address} fails ({one_line(error)}): start one, or leave out --ray"
        ) from error
    finally:
        ray.shutdown()


class _ShardEncoder:
    """Encodes shards in an actor of a Ray cluster, which keeps its model and data."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    @cached_property
    def opened(self) -> tuple[Encoder, Dataset]:
        """Encoder and data set of this node.

        Raises:
            MismatchError: they differ from those of the process that started the run.
        """
        os.chdir(self.options["folder"])
        model, device, amp = self.options["model"]
        encoder, dataset = Encoder.load(model, device, amp=amp), self.options["opening"]()
        if (encoder.fingerprint, dataset.fingerprint) != self.options["fingerprints"]:
            raise MismatchError(
                f"{model} or {dataset.name} is not the same on all nodes: "
                "every node must see the same files"
            )
        return encoder, dataset

    def encode(self, path: str, start: int, stop: int) -> int:
        """Write the shard of the items from ``start`` to ``stop`` unless it exists.

        Returns:
            Its number of rows.

        Raises:
            OutputExistsError: there is a shard of another run.
        """
        encoder, dataset = self.opened
        data_fingerprint = fingerprint("shard", dataset.fingerprint, str(start), str(stop))
        header = replace(make_header("codes", encoder, dataset), data_fingerprint=data_fingerprint)
        with contextlib.suppress(DataError), RowReader(path, kind="codes") as reader:
            if reader.header.fingerprint() == header.fingerprint():
                return reader.ntotal
        with RowWriter(path, header) as writer:
            encode_rows(encoder, dataset, writer, self.options["batch_size"], range(start, stop))
            return writer.rows

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Encode the only shard of a batch of Ray Data, and add its number of rows or an error
        message.
        """
        try:
            rows, message = self.encode(*(batch[key][0] for key in ("path", "start", "stop"))), ""
        except (GpqError, OSError) as error:
            rows, message = 0, str(error)
        return {**batch, "rows": [rows], "error": [message]}
