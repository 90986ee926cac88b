# One HTML page over all runs.


localrules:
    report,  # takes a second on small files


rule report:
    input:
        plans=expand("results/runs/{run}/plan.json", run=pipeline.runs),
        trained=expand("results/runs/{run}/train/status.json", run=pipeline.runs),
        models=expand("results/runs/{run}/model/config.json", run=pipeline.runs),
        metrics=expand("results/runs/{run}/evaluate/metrics.json", run=pipeline.runs),
        manifests=expand("results/corpora/{corpus}/shards/manifest.json", corpus=reported_corpora()),
    output:
        report("results/report/index.html", caption="../report/report.rst", category="Report"),
    log:
        "logs/report/report.log",
    benchmark:
        "results/benchmarks/report/report.tsv"
    conda:
        "../../envs/cellmill.yaml"
    params:
        options=options("report"),
        options_file=options_file("report"),
        runs=expand("results/runs/{run}", run=pipeline.runs),
        corpora=expand("results/corpora/{corpus}", corpus=reported_corpora()),
    shell:
        "cellmill report --options {params.options_file:q} --runs {params.runs:q} --corpora {params.corpora:q}"
        " --out {output:q} 2>&1 | tee -i {log:q}"
