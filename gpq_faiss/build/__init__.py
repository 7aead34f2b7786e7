"""Index files made of codes: the sources, the builds in a stream, and the stages ``index`` and ``export-faiss``."""
