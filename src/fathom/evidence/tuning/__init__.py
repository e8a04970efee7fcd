"""What the ledger says of runs that tune on rows of files."""
