"""Conversion of codes to Faiss' own objects, its files, and model folders."""
