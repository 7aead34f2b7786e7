"""The stages, one per file, each of which is the command of its name.

A stage takes a config and paths, and returns a path or a result.
"""
