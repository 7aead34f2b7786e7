"""One stage per file: a config and paths in, a path or a result (``*_result.py``) out; each is the command of its name."""
