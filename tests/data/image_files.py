"""Small images, tables and other sources for the tests of data."""

import io
import tarfile
from pathlib import Path
from typing import Any

import datasets
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from gpq_faiss.data.base import Dataset
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError, UsageError


def png(seed: int, size: int = 4) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def put(root: Path, *names: str, size: int = 4) -> None:
    for i, name in enumerate(names):
        save(root / name, png(i, size))


def raw_tar(*members: tuple[str, bytes, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, data in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(data), "/etc/passwd"
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def save(path: Path, content: Any) -> Path:
    """Bytes or text as they are; arrays and columns in the form of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes | str):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    elif path.suffix == ".npy":
        np.save(path, content)
    elif path.suffix == ".npz":
        np.savez(path, **content)
    elif path.suffix == ".h5":
        with h5py.File(path, "w") as h5:
            for name, array in content.items():
                h5[name] = array
    else:
        pq.write_table(pa.table(content), path)
    return path


def hub(kinds: dict[str, Any] | None = None, /, **columns: Any) -> datasets.Dataset:
    """A data set of columns, some of them of kinds."""
    data = datasets.Dataset.from_dict(columns)
    for name, kind in (kinds or {}).items():
        data = data.cast_column(name, kind)
    return data


def shard(path: Path, members: dict[str, bytes | None]) -> str:
    """A tar of those members that have a content, as a WebDataset."""
    entries = (
        (name, tarfile.REGTYPE, content) for name, content in members.items() if content is not None
    )
    return f"webdataset:{save(path, raw_tar(*entries))}"


def refused(spec: Any, message: str, **options: Any) -> str:
    """What a source says that cannot be opened or read: one line."""
    with pytest.raises((DataError, UsageError), match=message) as caught:
        open_data(spec, **options).read(slice(None))
    assert str(caught.value).isprintable()
    return str(caught.value)


class Items:
    """A map-style data set; exceptions are raised."""

    def __init__(self, values: list[Any], **attributes: Any) -> None:
        self.values = values
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> Any:
        if isinstance(self.values[i], Exception):
            raise self.values[i]
        return self.values[i]


def class_numbers(dataset: Dataset) -> list[int]:
    """The class number of each item, -1 without a label."""
    labels = dataset.require_labels()
    return np.where(labels.has(), labels.dense().argmax(axis=1), -1).tolist()


def label_texts(dataset: Dataset) -> list[str]:
    """The labels of each item, with spaces between them."""
    if dataset.labels is None:
        return [""] * len(dataset)
    names = dataset.labels.class_names
    return [" ".join(names[c] for c in np.flatnonzero(row)) for row in dataset.labels.dense()]
