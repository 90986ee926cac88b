# Entry at the root; the workflow is workflow/Snakefile.
include: "workflow/Snakefile"


workflow.default_target = "all"  # Snakemake takes no default target from an included file
