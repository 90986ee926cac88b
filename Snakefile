# Entry at the root; the workflow is workflow/Snakefile.
include: "workflow/Snakefile"


# Snakemake takes no default target from an included file
rule default:
    default_target: True
    input:
        rules.all.input,
    message:
        "every file is made"
