"""Plans as text and as plan.json."""
