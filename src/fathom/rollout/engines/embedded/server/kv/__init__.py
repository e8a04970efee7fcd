"""Which page of KV memory holds what, and for whom: a pool of pages, a cache of prefixes, the tables of sequences."""
