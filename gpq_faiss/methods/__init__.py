"""Everything that turns vectors or images into codes, a file per method."""
