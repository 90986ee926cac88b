"""Go or no-go of a partition: what a profile promises against what a cluster has."""
