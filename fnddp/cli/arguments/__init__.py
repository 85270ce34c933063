"""What each command takes: a file for each, with `add(commands)`, and no import that its `--help` does not need."""
