"""Encoding on a Ray cluster: images or embeddings ─► codes.h5.

The workers of the cluster run the network, and the stage :func:`gpq_faiss.encode` writes their
codes in the order of the items. So it is the stage that checks, resumes and replaces; whatever was
begun with a cluster can be finished without one, and the reverse.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..codes.checks import Codes, Ids
from ..data.base import Dataset
from ..data.open import open_data
from ..encoder import Encoder
from ..errors import DataError, GpqError, MismatchError, UsageError, one_line, optional
from ..evaluation.ranking import usable_cores
from ..progress import levels, stage
from ..signals import keeping_sigterm
from ..stages.encode import encode, make_header


def encode_on_ray(
    model: str | Path,
    data: object,
    out: str | Path,
    address: str = "local",
    *,
    device: str = "cpu",
    batch_size: int = 0,
    amp: bool = False,
    overwrite: bool = False,
    **read: Any,
) -> Path:
    """Encode ``data`` on a Ray cluster, whose nodes see the same files under the same paths.

    The codes are those of :func:`encode` without a features file. An interrupted run is continued.
    There is a worker per GPU, or without GPUs one per core. If Ray is connected already, that
    connection is used.

    Args:
        model, out, batch_size, amp, overwrite: as for :func:`encode`; the automatic size of a batch
            is that of a CPU.
        data: anything that :func:`gpq_faiss.open_data` accepts and a node can open.
        address: ``local`` (a cluster on this machine, which other machines cannot reach), ``auto``
            (the cluster running here), or ``HOST:PORT``.
        device: ``cpu``, ``cuda``, or ``auto``: GPUs if the cluster has any.
        read: further arguments of :func:`gpq_faiss.open_data`.

    Returns:
        ``out``.

    Raises:
        DataError: no cluster responds, unreadable items beyond the limit, or as :func:`encode`.
        MismatchError: data that do not fit the model, or other data on a node.
        UsageError: no GPU; Ray is not installed.
    """
    opening = partial(open_data, data, **read)
    return encode(
        # On the CPU: this process does not run the network, and may have no GPU.
        _RayEncoder(
            **vars(Encoder.load(model, amp=amp)),
            address=address,
            worker_device=device,
            opening=opening,
        ),
        opening(),
        out,
        keep_features=False,
        batch_size=batch_size,
        overwrite=overwrite,
    )


@dataclass(frozen=True, kw_only=True)
class _RayEncoder(Encoder):
    """An encoder whose network runs on the workers of a Ray cluster.

    Attributes:
        address, worker_device: the cluster and the device, as for :func:`encode_on_ray`.
        opening: opens the data on a node.
    """

    address: str
    worker_device: str
    opening: Callable[[], Dataset]

    def code_batches(
        self, dataset: Dataset, rows: Ids, *, start: int = 0, batch_size: int = 0
    ) -> Iterator[tuple[Ids, Codes]]:
        """Yield rows and packed codes uint8 [n, code_size] of the items at ``rows[start:]`` in
        batches; ``rows`` are all rows of the data set.
        """
        with connected(self.address) as ray:
            has_gpu = self.worker_device != "cpu" and "GPU" in ray.cluster_resources()
            if self.worker_device.startswith("cuda") and not has_gpu:
                raise UsageError(f"the cluster at {self.address} has no GPU: use --device cpu")
            # A worker reads ahead within a part, and another worker repeats it if the first dies.
            # Ray takes seconds to start on 10,000 parts.
            starts = range(
                start, len(rows), batch_size * max(16, len(rows) // (10_000 * batch_size))
            )
            parts = ray.data.from_items(
                [{"start": i, "stop": min(i + starts.step, len(rows))} for i in starts],
                # An earlier run may have encoded all items, and ended before it wrote the file.
                override_num_blocks=len(starts) or None,
            ).map_batches(
                _Worker,
                fn_constructor_kwargs={
                    "options": {
                        "folder": os.getcwd(),
                        "model": (self.source, "cuda" if has_gpu else "cpu"),
                        "amp": self.amp,
                        "opening": self.opening,
                        "fingerprint": make_header("codes", self, dataset).fingerprint(),
                    },
                },
                fn_kwargs={"batch_size": batch_size},
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(min_size=1),
                num_cpus=1,
                num_gpus=int(has_gpu),
            )
            parts.context.enable_progress_bars = False
            parts.context.execution_options.preserve_order = True
            with (
                stage("encoding items", len(rows), done=start) as encoding,
                levels(logging.CRITICAL, "ray", "ray.data"),
            ):
                for batch in parts.iter_rows():
                    if batch["error"]:
                        raise DataError(batch["error"])
                    for row, reason in json.loads(batch["unreadable"]).items():
                        dataset.add_bad(int(row), *reason.split(": ", 1))
                    yield batch["rows"], batch["codes"]
                    encoding.update(min(batch_size, len(rows) - encoding.n))


@dataclass
class _Worker:
    """Encodes parts of the data in an actor of a Ray cluster, which keeps its model and data.

    Attributes:
        options: what to open, and where.
    """

    options: dict[str, Any]

    @cached_property
    def opened(self) -> tuple[Encoder, Dataset]:
        """Encoder and data set of this node.

        Raises:
            MismatchError: they differ from those of the process that started the run.
        """
        os.chdir(self.options["folder"])
        encoder = Encoder.load(*self.options["model"], amp=self.options["amp"])
        dataset = self.options["opening"]()
        if make_header("codes", encoder, dataset).fingerprint() != self.options["fingerprint"]:
            raise MismatchError(
                f"{encoder.source} or {dataset.name} is not the same on all nodes: "
                "every node must see the same files"
            )
        return encoder, dataset

    def __call__(self, part: dict[str, Any], batch_size: int) -> Iterator[dict[str, Any]]:
        """Yield rows, codes and unreadable items of each batch of a part of the data; at an error,
        an empty batch with its message, since not every exception survives its way through Ray.
        """
        try:
            encoder, dataset = self.opened
            items = range(part["start"][0], part["stop"][0])
            for readable, codes in encoder.code_batches(
                dataset, np.array(items), batch_size=batch_size
            ):
                yield {
                    "rows": [readable],
                    "codes": [codes],
                    # Of the whole part, as images are read ahead; other threads add to them.
                    "unreadable": [
                        json.dumps({i: dataset.bad[i] for i in [*dataset.bad] if i in items})
                    ],
                    "error": [""],
                }
        except (GpqError, OSError) as error:
            yield {
                "rows": [np.empty(0, np.int64)],
                "codes": [np.empty((0, 0), np.uint8)],
                "unreadable": ["{}"],
                "error": [str(error)],
            }


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect to a Ray cluster, and yield the module ``ray`` to a block that works with it.

    The connection stays open until ``ray.shutdown()`` or the end of the process. If there is one
    already, it is used, and the address is ignored.

    Raises:
        UsageError: Ray is not installed.
        DataError: no cluster responds, or it fails during the block.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads it on import
    ray = optional("ray", "the package ray is missing: pip install 'gpq-faiss[ray]'")
    # By default Ray (tried with 2.60) listens on all interfaces, also where its cluster is this
    # machine.
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = address != "local"
    try:
        with keeping_sigterm():  # whose handler Ray replaces
            ray.init(
                address,
                num_cpus=usable_cores() if address == "local" else None,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                ignore_reinit_error=True,
            )
        yield ray
    except GpqError:
        raise
    except Exception as error:  # Ray raises a bare Exception if its processes do not start in time
        raise DataError(
            f"the Ray cluster at {address} fails ({one_line(error)}): start one, or leave out --ray"
        ) from error
