"""Conversion of codes to Faiss' own objects, its files and model folders, and its k-means."""
