"""Work on a Ray cluster, whose nodes share a file system under the same paths.

Ray is imported on first use.
"""
