"""Sub-commands that are no stage of the workflow.

`project` starts projects and runs them; `status` and `watch` show runs, `run` acts on them; `profiles` and
`preflight` look after machines, `corpora` after data, `exchange` after models of other packages,
`translate` after configurations of scModelForge.
"""
