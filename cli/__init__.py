"""The command line ``gpq``: one file a command; each parses, makes one library call and prints."""
