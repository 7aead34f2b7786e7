"""How far a build that was cut off has come, from what lies beside its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def progress_of(out: Path) -> dict[str, Any] | None:
    """Finished sources and rows; None where no build is unfinished."""
    record = out.with_name(f".{out.name}.building") / "progress.json"
    if not record.exists():
        return None
    state = json.loads(record.read_text())
    return {"shards": len(state["shards"]), "rows": state["rows"]}
