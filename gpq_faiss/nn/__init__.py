"""The network: backbones, the quantiser on top of them, and augmentation of image batches."""
