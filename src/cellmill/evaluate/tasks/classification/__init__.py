"""Tasks that classify cells by label, one file each, and what they share."""
