"""One stage per file: a config and paths in, a path or a result out; each is the command of its name."""
