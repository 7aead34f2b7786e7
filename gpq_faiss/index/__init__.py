"""What users hold: an index in memory or over a file. Nothing here needs torch."""
