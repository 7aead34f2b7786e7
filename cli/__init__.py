"""The command line ``gpq``: one file per command; each parses, makes one library call and prints."""
