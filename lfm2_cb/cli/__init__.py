"""The `lfm2-cb` command."""
