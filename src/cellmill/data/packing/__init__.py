"""Integers of cells packed into few bits, and the loops that pack and unpack them.

`layout` defines the bytes of a part. `codec` packs and unpacks parts, by `part_loops` or `by_numpy`.
`cells` and `row_file` have packed cells in memory and in files.
"""
