"""The command line. What the `demo` extra installs is imported by the demo's own files only."""
