"""Sub-commands that are no stage of the workflow.

`status` and `watch` show runs, `run` acts on them; `preflight` looks after profiles, `corpora` after data,
`exchange` after models of other packages, `translate` after configurations of scModelForge.
"""
