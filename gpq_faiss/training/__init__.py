"""Training: the loop, its batches and checkpoints, and its output folders."""
