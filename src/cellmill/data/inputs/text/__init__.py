"""Text inputs: Matrix Market and its tables of names, tables of counts, and FASTA."""
