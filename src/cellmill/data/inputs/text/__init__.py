"""Text inputs: tables of names, coordinates of Matrix Market, and dense tables of counts."""
