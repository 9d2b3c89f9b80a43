"""The command line: one small file a command, found through the table in main.py."""
