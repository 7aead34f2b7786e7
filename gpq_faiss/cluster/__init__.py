"""Work on a Ray cluster: ``tasks`` runs function calls as tasks, ``search`` searches index shards in actors.

All nodes must share a file system, mounted at the same paths. Ray is imported on first use.
"""
