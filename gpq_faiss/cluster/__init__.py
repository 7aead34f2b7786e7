"""A Ray cluster: ``tasks`` runs calls of the stages on it, ``search`` holds shards of an index in its actors.

Files are those of a file system that all nodes share, under the same paths. Ray is imported when it is first needed.
"""
