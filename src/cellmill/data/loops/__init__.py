"""Loops that numba compiles when their module is imported; nothing is imported before it pays off.

`cell_loops` and `part_loops` handle cells and packed parts (loaded by `data.compiled_loops`),
`line_loop` lines of text (loaded by `data.inputs.text.lines`).
"""
