"""One stage per file: a config and paths in, a path out; each is the command of its name."""
