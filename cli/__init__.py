"""The command line ``gpq``: one file per command, which parses, calls the library and prints."""
