"""Training by gradient: the loop, its batches and checkpoints, and the folders that it writes."""
