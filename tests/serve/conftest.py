"""A model of random weights, digits in an index, and the service over them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_factory import digits, make_model
from served import TOKEN, Served, client_of, open_live

from gpq_faiss import Encoder, encode, index
from gpq_faiss.serve.schemas import Settings
from gpq_faiss.serve.service import Service


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model``, for digits, ``codes.h5`` and ``index.faiss``."""
    folder = tmp_path_factory.mktemp("made")
    model = make_model(folder / "model", "images", image_size=8, backbone="mlp")
    index(model, encode(model, "digits", folder / "codes.h5"), folder / "index.faiss")
    return folder


@pytest.fixture(scope="session")
def encoder(built: Path) -> Encoder:
    return Encoder.load(built / "model")


@pytest.fixture
def index_file(built: Path, tmp_path: Path) -> Path:
    """The index, to be changed."""
    for path in built.glob("index.faiss*"):
        shutil.copy(path, tmp_path)
    return tmp_path / "index.faiss"


@pytest.fixture
def served(encoder: Encoder, index_file: Path) -> Iterator[Served]:
    """The service in this process, writable, with the digits as its data."""
    with open_live(index_file, writable=True) as live:
        service = Service(encoder, live, digits(), Settings(token=TOKEN))
        yield Served(client_of(service), index_file)
