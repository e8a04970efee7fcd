"""Claims and audits recomputed from the ledger."""
