"""A copy of the shared products, as the current folder."""

import shutil
from pathlib import Path

import pytest
from commands import Shop


@pytest.fixture
def folder(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the products of ``shop`` into the current folder, so that calls read as in a shell."""
    copy = tmp_path / "folder"
    shutil.copytree(shop.root, copy)
    monkeypatch.chdir(copy)
    return copy
