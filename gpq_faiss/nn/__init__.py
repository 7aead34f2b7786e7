"""Networks: backbones, quantisers, and augmentation of image batches."""
