"""Where a chain's objects lie: a local folder, an object store, or one that fails on demand."""
