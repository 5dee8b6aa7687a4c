"""The command line; every sub-command is a thin call into one layer."""
