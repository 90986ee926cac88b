"""Matrices made from stored ones: columns summed, counts recovered, rows put in order."""
