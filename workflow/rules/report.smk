# Tables of sweeps, and one HTML page over all runs.


rule sweep:
    input:
        plans=jobs.of_sweep("results/runs/{run}/plan.json"),
        trained=jobs.of_sweep("results/runs/{run}/train/status.json"),
        metrics=jobs.of_sweep("results/runs/{run}/evaluate/metrics.json"),
    output:
        table="results/sweeps/{sweep}/results.csv",
        curves="results/sweeps/{sweep}/curves.json",
    log:
        "logs/sweep/{sweep}.log",
    benchmark:
        "results/benchmarks/sweep/{sweep}.tsv"
    localrule: True  # both take seconds on small files
    conda:
        "../../envs/cellmill.yaml"
    params:
        values=jobs.options("sweep"),
    message:
        JOB_LINE
    shell:
        "cellmill sweep --values {params.values:q} --runs results/runs --out {output.table:q}" " 2>&1 | tee -i {log:q}"


# Inputs are every file that the workflow is run for, read or not: rule all asks for each of them too.
rule report:
    input:
        plans=expand("results/runs/{run}/plan.json", run=pipeline.runs),
        trained=expand("results/runs/{run}/train/status.json", run=pipeline.runs),
        models=expand("results/runs/{run}/model/{file}", run=pipeline.runs, file=MODEL_FILES),
        metrics=expand("results/runs/{run}/evaluate/{file}", run=pipeline.runs, file=("metrics.json", "umap.tsv")),
        kept=jobs.evaluated_steps(),
        manifests=expand("results/corpora/{corpus}/shards/manifest.json", corpus=jobs.reported_corpora()),
        quality=jobs.quality_reports(),
        sweeps=expand("results/sweeps/{sweep}/{file}", sweep=jobs.swept, file=("results.csv", "curves.json")),
    output:
        report("results/report/index.html", caption="../report/report.rst", category="Report"),
    log:
        "logs/report/report.log",
    benchmark:
        "results/benchmarks/report/report.tsv"
    localrule: True
    conda:
        "../../envs/cellmill.yaml"
    params:
        options=jobs.options("report"),
        runs=expand("results/runs/{run}", run=pipeline.runs),
        corpora=expand("results/corpora/{corpus}", corpus=jobs.reported_corpora()),
        sweeps=["--sweeps", *expand("results/sweeps/{sweep}/curves.json", sweep=jobs.swept)] if jobs.swept else [],
    message:
        JOB_LINE
    shell:
        "cellmill report --options {params.options:q} --runs {params.runs:q} --corpora {params.corpora:q}"
        " {params.sweeps:q} --out {output:q} 2>&1 | tee -i {log:q}"
