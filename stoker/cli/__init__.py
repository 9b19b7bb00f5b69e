"""The command line: one file a command, found and registered by main.py."""
