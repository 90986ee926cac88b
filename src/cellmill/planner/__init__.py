"""The plan of a run before it starts: parameters, memory, traffic and time, and layouts that fit a machine."""
