"""Every version of the last steps, so that any of them can be rebuilt bit for bit: anchors, and what changed since."""
