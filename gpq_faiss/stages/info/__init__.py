"""Description of files and folders: everything that this package writes, Faiss indexes, and arrays.

The kind is detected by content, not by name. Files are verified as by the stages that use them, so ``info`` also detects damage.
"""

from __future__ import annotations

from .describe import info
from .encoder import read_encoder_metadata

__all__ = ["info", "read_encoder_metadata"]
