"""Commands: flags in, one domain call, output."""
