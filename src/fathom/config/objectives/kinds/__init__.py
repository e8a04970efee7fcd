"""Named objectives, one file each. None of them needs torch: each puts together what the trainer computes."""
