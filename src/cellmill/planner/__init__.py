"""Parameters, memory, traffic and time of a run in advance; the layouts that fit a machine."""
