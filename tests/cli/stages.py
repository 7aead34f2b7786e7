"""A call of every stage that writes something, for tests of what happens to outputs."""

from __future__ import annotations

from pathlib import Path

from commands import Shop

TRAIN = ("--preset", "paper", "--set", "training.steps=2")
"""What makes a training short."""

STAGES = {
    "train": "out",
    "encode": "codes.h5",
    "export-faiss": "out.faiss",
    "index": "out.faiss",
    "search json": "out.json",
    "search png": "out.png",
    "evaluate plot": "out.png",
    "export-encoder": "out.pt2",
}


def stage_call(stage: str, shop: Shop, folder: Path) -> tuple[list[str], Path]:
    """The arguments of a stage that works, and its output below ``folder``."""
    out = folder / STAGES[stage]
    labels = ("--labels", shop.labels)
    search = ("search", shop.model, shop.index, shop.queries, "-k", 3)
    pictures = (
        "search",
        shop.image_model,
        shop.image_index,
        shop.photo,
        "-k",
        2,
        "--images",
        f"folder:{shop.images}",
    )
    calls: dict[str, tuple[object, ...]] = {
        "train": ("train", shop.data, *labels, *TRAIN, "--out", out),
        "encode": ("encode", shop.model, shop.data, *labels, "--out", out),
        "export-faiss": ("export-faiss", shop.model, "--out", out),
        "index": ("index", shop.model, shop.codes, "--out", out),
        "search json": (*search, "--format", "json", "--out", out),
        "search png": (*pictures, "--format", "png", "--out", out),
        "evaluate plot": ("evaluate", shop.model, shop.data, *labels, "--plot", out),
        "export-encoder": ("export-encoder", shop.model, "--out", out),
    }
    return [str(part) for part in calls[stage]], out


WITHOUT_OUT = {"info", "search", "evaluate"}
"""Commands that need no --out."""


def fill(call: tuple[str, ...], shop: Shop, bad: Path, out: Path) -> list[str]:
    """The call with its capitals replaced."""
    names = {
        "IMAGE_MODEL": shop.image_model,
        "MODEL": shop.model,
        "INDEX": shop.index,
        "CODES": shop.codes,
        "IMAGE_INDEX": shop.image_index,
        "QUERIES": shop.queries,
        "LABELS": shop.labels,
        "IMAGES": shop.images,
        "DATA": shop.data,
        "root=IMAGES": f"root={shop.images}",
    }
    arguments = [str(names.get(part, part)).replace("BAD", str(bad)) for part in call]
    return arguments if call[0] in WITHOUT_OUT else [*arguments, "--out", str(out)]
