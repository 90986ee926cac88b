# So that `snakemake` works at the root; the pipeline is workflow/Snakefile.
include: "workflow/Snakefile"


workflow.default_target = "all"  # included rules are no default target by themselves
