"""Names beside the index: the service shows them without the data, and never for another item."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from model_factory import make_model

import gpq_faiss as gpq
from gpq_faiss.build.item_files import open_items
from gpq_faiss.encoder import Encoder
from gpq_faiss.serve.live import LiveIndex
from gpq_faiss.serve.service import Service


def test_names_come_from_beside_the_index(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", width=20, M=4)
    x = np.random.default_rng(0).standard_normal((30, 20)).astype(np.float32)
    np.savez(tmp_path / "x.npz", features=x, names=np.array([f"n{i}" for i in range(30)]))
    codes = gpq.encode(model, f"features:{tmp_path / 'x.npz'}", tmp_path / "codes.h5")
    index = gpq.index(model, codes, tmp_path / "i.faiss")
    encoder = Encoder.load(model)
    live = LiveIndex(index, encoder.model.codebooks, writable=True)
    code = live.snapshot.code(3)

    async def names(*ids: int) -> list[object]:
        service = Service(encoder, live, items=open_items(index), watch=False)
        return [entry.get("name") for entry in await service.known(np.array(ids))]

    assert asyncio.run(names(3, 29, 77)) == ["n3", "n29", None]
    live.commit([(5, None), (40, code)])
    assert live.compact()
    assert asyncio.run(names(3, 40)) == ["n3", None]
    # The id of an item that went is given to another, which is not called as the old one was.
    live.commit([(5, code)])
    assert asyncio.run(names(3, 5)) == ["n3", None]
    assert live.compact()
    assert open_items(index) is None
    live.close()
