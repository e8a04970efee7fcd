"""Runs that tune on rows of files: `fathom sft` and `fathom dpo`."""
