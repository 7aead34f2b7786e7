"""Conversion of codes to and from Faiss' own objects and files, and model folders."""
