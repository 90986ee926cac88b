"""Options of interchangeable parts, one file per kind."""
