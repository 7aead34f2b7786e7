"""Of the documentation site: files beside ``docs/`` that pages link to, and formulas as MathML, so
that no script is loaded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(\]\()\.\./([^)#\s]+)(#[^)]*)?\)")
_BLOCK = re.compile(r"^\$\$\n(.+?)\n\$\$$", re.S | re.M)
_INLINE = re.compile(r"(?<![\\$\w])\$([^$\n]+?)\$(?![\w$])")
_FENCE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.S | re.M)


def on_files(files: Files, config: Any) -> Files:
    """Result tables and pictures of ``benchmarks/results`` become pages and files of the site."""
    for path in sorted((ROOT / "benchmarks" / "results").rglob("*")):
        if path.suffix in (".md", ".png", ".json"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links out of ``docs/``: to results within the site; to a source file, its name."""
    depth = page.file.src_uri.count("/")

    def link(found: re.Match[str]) -> str:
        target = found[2]
        if target.startswith("benchmarks/results/"):
            return f"{found[1]}{'../' * depth}{target}{found[3] or ''})"
        return f"](#source-{Path(target).name})"

    if page.file.src_uri.startswith("benchmarks/"):
        return markdown
    markdown = _LINK.sub(link, markdown)
    # To a file of the repository: its name alone, for it is not part of the site.
    markdown = re.sub(r"\[([^\]]+)\]\(#source-[^)]*\)", r"\1", markdown)
    parts = _FENCE.split(markdown)
    for at in range(0, len(parts), 2):
        parts[at] = _BLOCK.sub(lambda m: "\n" + convert(m[1], display="block") + "\n", parts[at])
        parts[at] = _INLINE.sub(lambda m: convert(m[1]), parts[at])
    return "".join(parts)
