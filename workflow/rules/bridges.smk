# Metrics of other packages on an evaluated dataset, made on request alone: on its embedding, or (cell_eval, cell_eval2) on predicted
# changes of its perturbations. Each runs in an environment of its own, without cellmill: that of `--sdm conda`, the
# Python that `bridges` of the configuration names, or the one that runs Snakemake.


rule scib_metrics:
    input:
        cells=jobs.bridged("{corpus}/unpacked/{dataset}.h5ad"),
        embedding="results/runs/{run}{at}/embeddings/{dataset}.h5ad",
        metrics="results/runs/{run}{at}/evaluate/metrics.json",
        umap="results/runs/{run}{at}/evaluate/umap.tsv",
    output:
        "results/runs/{run}{at}/bridges/{dataset}.scib-metrics.json",
    log:
        "logs/scib_metrics/{run}{at}.{dataset}.log",
    benchmark:
        "results/benchmarks/scib_metrics/{run}{at}.{dataset}.tsv"
    conda:
        "../../envs/bridge-scib-metrics.yaml"
    threads: 4
    resources:
        python=jobs.bridge_python("scib-metrics"),
        script=lambda wildcards: script("scib_bridge.py"),
        mem_mb=sized(16000, 3),
        runtime=120,
    params:
        label=jobs.bridge_label,
    message:
        JOB_LINE
    shell:
        "{resources.python:q} {resources.script:q} --cells {input.cells:q} --embedding {input.embedding:q} --metrics {input.metrics:q}"
        " --umap {input.umap:q} --label {params.label:q} --out {output:q} 2>&1 | tee -i {log:q}"


rule cz_benchmarks:
    input:
        cells=jobs.bridged("{corpus}/unpacked/{dataset}.h5ad"),
        embedding="results/runs/{run}{at}/embeddings/{dataset}.h5ad",
        metrics="results/runs/{run}{at}/evaluate/metrics.json",
        umap="results/runs/{run}{at}/evaluate/umap.tsv",
    output:
        "results/runs/{run}{at}/bridges/{dataset}.cz-benchmarks.json",
    log:
        "logs/cz_benchmarks/{run}{at}.{dataset}.log",
    benchmark:
        "results/benchmarks/cz_benchmarks/{run}{at}.{dataset}.tsv"
    conda:
        "../../envs/bridge-cz-benchmarks.yaml"
    threads: 4
    resources:
        python=jobs.bridge_python("cz-benchmarks"),
        script=lambda wildcards: script("cz_bridge.py"),
        mem_mb=sized(16000, 3),
        runtime=120,
    params:
        label=jobs.bridge_label,
    message:
        JOB_LINE
    shell:
        "{resources.python:q} {resources.script:q} --cells {input.cells:q} --embedding {input.embedding:q} --metrics {input.metrics:q}"
        " --umap {input.umap:q} --label {params.label:q} --out {output:q} 2>&1 | tee -i {log:q}"


rule cell_eval:
    input:
        changes="results/runs/{run}{at}/changes/{dataset}.h5ad",
    output:
        "results/runs/{run}{at}/bridges/{dataset}.cell-eval.json",
    log:
        "logs/cell_eval/{run}{at}.{dataset}.log",
    benchmark:
        "results/benchmarks/cell_eval/{run}{at}.{dataset}.tsv"
    conda:
        "../../envs/bridge-cell-eval.yaml"
    threads: 4
    resources:
        python=jobs.bridge_python("cell-eval"),
        script=lambda wildcards: script("cell_bridge.py"),
        mem_mb=sized(16000, 3),
        runtime=240,
    message:
        JOB_LINE
    shell:
        "{resources.python:q} {resources.script:q} --changes {input.changes:q} --threads {threads:q} --out {output:q} 2>&1 | tee -i {log:q}"


rule cell_eval2:
    input:
        changes="results/runs/{run}{at}/changes/{dataset}.h5ad",
    output:
        "results/runs/{run}{at}/bridges/{dataset}.cell-eval2.json",
    log:
        "logs/cell_eval2/{run}{at}.{dataset}.log",
    benchmark:
        "results/benchmarks/cell_eval2/{run}{at}.{dataset}.tsv"
    conda:
        "../../envs/bridge-cell-eval2.yaml"
    threads: 4
    resources:
        python=jobs.bridge_python("cell-eval2"),
        script=lambda wildcards: script("cell2_bridge.py"),
        mem_mb=sized(16000, 3),
        runtime=240,
    message:
        JOB_LINE
    shell:
        "{resources.python:q} {resources.script:q} --changes {input.changes:q} --threads {threads:q} --out {output:q} 2>&1 | tee -i {log:q}"
