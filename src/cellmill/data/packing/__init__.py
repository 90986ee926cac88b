"""Integers of cells packed into few bits, and the loops that unpack them."""
