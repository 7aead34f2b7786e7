"""Data sets: images and features, their labels, and splits."""
