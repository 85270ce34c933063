"""The command line. Only files that draw or load digits import packages of the extra `demo`."""
