"""Commands that look after runs and machines: one module for each."""
