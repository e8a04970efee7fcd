"""Commands of runs that tune on rows of files."""
