"""A model of random weights, digits in an index, and the service over them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_factory import digits, make_model
from served import TOKEN, Served, open_live
from starlette.testclient import TestClient

from gpq_faiss import Encoder, encode, index
from gpq_faiss.serve.app import create_app
from gpq_faiss.serve.guard import Settings
from gpq_faiss.serve.service import Service


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model``, for digits, and ``index.faiss``."""
    folder = tmp_path_factory.mktemp("made")
    model = make_model(folder / "model", "images", image_size=8, backbone="mlp")
    codes = encode(model, "digits", folder / "codes.h5")
    index(model, codes, folder / "index.faiss")
    return folder


@pytest.fixture(scope="session")
def encoder(made: Path) -> Encoder:
    return Encoder.load(made / "model")


@pytest.fixture
def index_file(made: Path, tmp_path: Path) -> Path:
    """The index, to be changed."""
    for name in ("index.faiss", "index.faiss.json"):
        shutil.copy(made / name, tmp_path / name)
    return tmp_path / "index.faiss"


@pytest.fixture
def served(encoder: Encoder, index_file: Path) -> Iterator[Served]:
    """The service in this process, writable, with the digits as its data."""
    live = open_live(index_file, writable=True)
    service = Service(encoder, live, digits())
    app = create_app(service, Settings(token=TOKEN, rate=0))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield Served(client, service, index_file)
