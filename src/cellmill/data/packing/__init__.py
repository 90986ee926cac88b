"""Integers of cells packed into few bits.

`layout` defines the bytes of a part. `codec` packs and unpacks parts, by compiled loops
(`data.loops.part_loops`) or `by_numpy`.
`cells` and `cell_file` have packed cells in memory and in files.
"""
