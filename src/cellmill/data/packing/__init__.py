"""Integers of cells packed into few bits.

`layout` defines the bytes of a part. `codec` packs and unpacks parts, with compiled loops
(`data.loops.part_loops`) or with numpy (`by_numpy`). `cells` has packed cells in memory, and
`cell_file` reads them from files.
"""
