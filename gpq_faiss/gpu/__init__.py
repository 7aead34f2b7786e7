"""What needs a device and more than an index: rankings measured there. Indexes on devices are in ``gpq_faiss.index.gpu``."""
