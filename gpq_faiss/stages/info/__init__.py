"""What a file or folder is: anything that this package writes, a Faiss index, or arrays that it reads.

What a thing is, is read from its content, not from its name. Everything is verified as the stages that use it do;
so ``info`` also checks whether a file is whole.
"""

from __future__ import annotations

from .describe import info
from .encoder import read_encoder_metadata

__all__ = ["info", "read_encoder_metadata"]
