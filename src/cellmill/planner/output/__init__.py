"""Output of the planner: the plan as text and as plan.json, and a table by number of devices."""
