"""The command line. Only files that draw or load digits import what the extra `demo` installs."""
