"""A call of every stage that writes something, for tests of what happens to outputs."""

from __future__ import annotations

import re
from pathlib import Path

from commands import Shop

TRAIN = ("--preset", "paper", "--set", "training.steps=2")
"""What makes a training short."""

# Stage -> its output, and the call that makes it, for :func:`fill`.
STAGES = {
    "train": ("out", f"train DATA --labels LABELS {' '.join(TRAIN)}"),
    "encode": ("codes.h5", "encode MODEL DATA --labels LABELS"),
    "export-faiss": ("out.faiss", "export-faiss MODEL"),
    "index": ("out.faiss", "index MODEL CODES"),
    "search json": ("out.json", "search MODEL INDEX QUERIES -k 3 --format json"),
    "search png": (
        "out.png",
        "search IMAGE_MODEL IMAGE_INDEX PHOTO -k 2 --images folder:IMAGES --format png",
    ),
    "evaluate json": ("out.json", "evaluate MODEL DATA --labels LABELS --format json"),
    "export-encoder": ("out.pt2", "export-encoder MODEL"),
}


def stage_call(stage: str, shop: Shop, folder: Path) -> tuple[list[str], Path]:
    """The arguments of a stage that works, and its output below ``folder``."""
    name, call = STAGES[stage]
    return [*fill(tuple(call.split()), shop, folder / "bad"), "--out", str(folder / name)], folder / name


def fill(call: tuple[str, ...], shop: Shop, bad: Path, out: Path | None = None) -> list[str]:
    """The call with its capitals replaced, and with ``--out`` where the command needs it."""
    names = {
        "IMAGE_MODEL": shop.image_model,
        "MODEL": shop.model,
        "INDEX": shop.index,
        "CODES": shop.codes,
        "IMAGE_INDEX": shop.image_index,
        "QUERIES": shop.queries,
        "LABELS": shop.labels,
        "IMAGES": shop.images,
        "PHOTO": shop.photo,
        "DATA": shop.data,
        "BAD": bad,
    }
    arguments = [
        re.sub(rf"\b({'|'.join(names)})\b", lambda found: str(names[found[0]]), part) for part in call
    ]
    needs_none = out is None or call[0] in {"info", "search", "evaluate"}
    return arguments if needs_none else [*arguments, "--out", str(out)]
