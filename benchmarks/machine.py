"""What a benchmark ran on, to be kept beside its figures. Nothing that names the machine or a path on it."""

from __future__ import annotations

from gpq_faiss.experiment.machine import describe_machine

__all__ = ["describe_machine"]

if __name__ == "__main__":
    import json

    print(json.dumps(describe_machine(), indent=2))
