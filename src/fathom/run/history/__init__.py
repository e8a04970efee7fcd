"""What a run leaves behind: its folder, ledger, checkpoints, trackers."""
