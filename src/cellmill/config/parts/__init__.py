"""Options of interchangeable parts, one file per kind: importing one of them makes all choices
known by name.
"""

from cellmill.config.parts import families, methods, objectives, tasks, tokens, trackers

__all__ = ["families", "methods", "objectives", "tasks", "tokens", "trackers"]
