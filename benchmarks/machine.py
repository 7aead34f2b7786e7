"""Description of the machine, stored with the figures. Contains no host names or paths."""

from __future__ import annotations

from gpq_faiss.experiment.machine import describe_machine

__all__ = ["describe_machine"]

if __name__ == "__main__":
    import json

    print(json.dumps(describe_machine(), indent=2))
