"""The command line ``gpq``: its commands parse, call the library and print."""
