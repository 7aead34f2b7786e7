"""Self-contained HTML pages with tables, plots and pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..evaluation.tables import render
from ..files import check_output, write_text
from .gallery import Ranked

_SIDE = 160
"""Maximum side of pictures in pixels; larger ones are scaled down."""
_STYLE = """
:root{color-scheme:light dark;--line:#8884;--right:#1a9850;--wrong:#d73027}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse;display:block;overflow-x:auto}
th,td{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:left;white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.plot svg{max-width:100%;height:auto;background:#fff}
p.note{color:#777}
"""
_GALLERY = """
.row{display:flex;gap:.6rem;overflow-x:auto;padding:.6rem 0;border-bottom:1px solid var(--line)}
figure{margin:0;flex:none;width:7rem;font-size:.75rem;overflow-wrap:anywhere}
figure img{width:7rem;height:7rem;object-fit:contain;border:3px solid var(--line);box-sizing:border-box;background:#8881}
figure.query{margin-right:1rem}figure.right img{border-color:var(--right)}figure.wrong img{border-color:var(--wrong)}
img.pixels{image-rendering:pixelated}
"""


def save_page(title: str, parts: Sequence[str], out: str | Path, *, overwrite: bool = False) -> Path:
    """Write a page of ``parts``, HTML from the functions below. Raises OutputExistsError: ``out`` exists and ``overwrite`` is false."""
    path = check_output(out, overwrite=overwrite)
    head = (
        f'<meta charset="utf-8"><title>{escape(title)}</title><meta name="viewport" content="width=device-width,initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        f"<style>{_STYLE}{_GALLERY}</style>"
    )
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    write_text(path, f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}\n</body></html>\n')
    return path


def heading(text: str) -> str:
    """A heading."""
    return f"<h2>{escape(text)}</h2>"


def note(text: str) -> str:
    """A paragraph in grey."""
    return f'<p class="note">{escape(text)}</p>'


def table(rows: Sequence[Mapping[str, Any]], digits: int = 4) -> str:
    """A table of :func:`gpq_faiss.evaluation.tables.render`."""
    return render(rows, "html", digits=digits) if rows else note("nothing to show")


def plot(svg: str | Path) -> str:
    """Embed an SVG file drawn by this package."""
    text = Path(svg).read_text(encoding="utf-8")
    return f'<div class="plot">{text[text.index("<svg") :]}</div>'


def picture(image: NDArray[np.uint8], alt: str) -> str:
    """Embed an image uint8 [H, W, 3] or [H, W]; large ones are scaled down."""
    from PIL import Image

    small = Image.fromarray(image)
    pixels = ' class="pixels"' if max(small.size) < 64 else ""
    small.thumbnail((_SIDE, _SIDE))
    stream = io.BytesIO()
    # PNG for small pictures, as it is lossless; photographs would be ten times larger than as JPEG.
    small.save(stream, "PNG" if pixels else "JPEG", **({} if pixels else {"quality": 85}))
    kind = "png" if pixels else "jpeg"
    data = base64.b64encode(stream.getvalue()).decode()
    return f'<img{pixels} alt="{escape(alt, quote=True)}" src="data:image/{kind};base64,{data}">'


def gallery(rows: Sequence[Ranked]) -> str:
    """Each query and its results, framed green if relevant and red if not."""
    parts = []
    for row in rows:
        cells = [_figure(row.query, row.query_name or "query", "query")]
        for j, image in enumerate(row.results):
            mark = {True: "right", False: "wrong", None: ""}[row.known(j)]
            cells.append(_figure(image, row.text(j, 4) or f"result {j + 1}", mark))
        parts.append(f'<div class="row">{"".join(cells)}</div>')
    return "\n".join(parts)


def _figure(image: NDArray[np.uint8], text: str, mark: str) -> str:
    kind = f' class="{mark}"' if mark else ""
    return f"<figure{kind}>{picture(image, text)}<figcaption>{escape(text)}</figcaption></figure>"
