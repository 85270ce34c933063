"""Other libraries, one file each. Only who uses one imports its file."""
