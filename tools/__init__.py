"""The command line: `cli` chooses a command; the rooms are commands, bench, check and train."""
