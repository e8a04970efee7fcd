"""What is asked of the policy: members of groups, and evaluations."""
