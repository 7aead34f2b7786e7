"""Methods that turn vectors or images into codes, one file per method."""
