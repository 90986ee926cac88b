"""Bytes, hours and layouts as text."""

from cellmill.config.parallel import Layout, Parallel

MIN_HOURS = 0.1 / 60  # a shorter time is printed as less than this


def format_bytes(n_bytes: float) -> str:
    """Format a number of bytes in the largest unit in which the number is at least 1."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= 0.9995 * factor:  # rounded to three digits, at least 1
            return f"{_format_number(n_bytes / factor)} {unit}"
    return f"{n_bytes:.0f} bytes"


def format_hours(hours: float) -> str:
    """Format hours or GPU hours. Less than an hour is printed in minutes."""
    if hours < MIN_HOURS:
        return f"<{60 * MIN_HOURS:g} min"
    if hours < 59.95 / 60:  # 59.95 min or more would be printed as 60 min
        return f"{_format_number(60 * hours)} min"
    return f"{_format_number(max(1.0, hours))} h"


def _format_number(number: float) -> str:
    """Format a number with three digits, or with all digits before the point if these are more."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def describe_layout(parallel: Parallel, layout: Layout) -> str:
    """Describe a layout, such as HYBRID_SHARD (1 replica of 4 shards)."""
    kind = "ddp" if parallel.strategy == "ddp" else parallel.sharding_strategy
    schedule = "" if layout.pp == 1 else f" {parallel.schedule}"
    return f"{kind} ({layout.text}{schedule})"
