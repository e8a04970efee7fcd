"""The typed tree of one run, validated and resolved."""
