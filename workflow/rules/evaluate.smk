# Evaluation of an exported model, of a run's end or, with `at`, of a kept checkpoint; nothing else of its run is read.


rule embed:
    input:
        weights="results/runs/{run}{at}/model/model.safetensors",
        config="results/runs/{run}{at}/model/config.json",
        vocabulary="results/runs/{run}{at}/model/vocabulary.tsv",
        cells=jobs.of_corpus("{corpus}/cells/{dataset}.h5ad"),
    output:
        "results/runs/{run}{at}/embeddings/{dataset}.h5ad",
    log:
        "logs/embed/{run}{at}.{dataset}.log",
    benchmark:
        "results/benchmarks/embed/{run}{at}.{dataset}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        image
    threads: 4
    resources:
        mem_mb=sized(32000, 3),
        runtime=sized(240, 25),
    params:
        options=jobs.options("embed"),
    message:
        JOB_LINE
    shell:
        'cellmill embed --options {params.options:q} --model "$(dirname {input.weights:q})" --input {input.cells:q}'
        " --out {output:q} 2>&1 | tee -i {log:q}"


# By a command of `evaluate.external`; the file is that of all runs of the corpus with the same command. No container: the
# command has an environment of its own, which an image of this one would hide.
rule embed_external:
    input:
        cells="results/corpora/{corpus}/cells/{dataset}.h5ad",
        files=lambda wildcards: jobs.external_model(wildcards).read_files,
    output:
        "results/corpora/{corpus}/external/{external}/{dataset}-{digest}.h5ad",
    log:
        "logs/embed_external/{corpus}.{external}.{dataset}-{digest}.log",
    benchmark:
        "results/benchmarks/embed_external/{corpus}.{external}.{dataset}-{digest}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    threads: 4
    resources:
        mem_mb=sized(32000, 3),
        runtime=sized(240, 25),
    params:
        command=lambda wildcards: jobs.external_model(wildcards).line,
    message:
        JOB_LINE
    shell:
        "cellmill embed_external --name {wildcards.external:q} --command={params.command:q} --input {input.cells:q}"
        " --out {output:q} 2>&1 | tee -i {log:q}"


# Labels of any dataset of the corpus's table; only on request: results/runs/{run}/predictions/{dataset}.h5ad.
rule predict:
    input:
        weights="results/runs/{run}/model/model.safetensors",
        config="results/runs/{run}/model/config.json",
        vocabulary="results/runs/{run}/model/vocabulary.tsv",
        cells=jobs.of_corpus("{corpus}/cells/{dataset}.h5ad"),
    output:
        "results/runs/{run}/predictions/{dataset}.h5ad",
    log:
        "logs/predict/{run}.{dataset}.log",
    benchmark:
        "results/benchmarks/predict/{run}.{dataset}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        image
    threads: 4
    resources:
        mem_mb=sized(32000, 3),
        runtime=sized(240, 25),
    params:
        options=jobs.options("predict"),
    message:
        JOB_LINE
    shell:
        'cellmill predict --options {params.options:q} --model "$(dirname {input.weights:q})" --input {input.cells:q}'
        " --out {output:q} 2>&1 | tee -i {log:q}"


# Index of the embeddings of the corpus's cells, for `cellmill map`; only on request: results/runs/{run}/model/atlas/atlas.json.
rule atlas:
    input:
        weights="results/runs/{run}/model/model.safetensors",
        config="results/runs/{run}/model/config.json",
        embeddings=jobs.atlas_embeddings,
    output:
        "results/runs/{run}/model/atlas/atlas.json",
    log:
        "logs/atlas/{run}.log",
    benchmark:
        "results/benchmarks/atlas/{run}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        image
    threads: 1
    resources:
        mem_mb=sized(8000, 1),
        runtime=sized(60, 10),
    params:
        options=jobs.options("atlas"),
        labels=jobs.atlas_labels,
    shell:
        'cellmill atlas --options {params.options:q} --model "$(dirname {input.weights:q})"'
        " --embeddings {input.embeddings:q} --labels {params.labels:q} 2>&1 | tee -i {log:q}"


# Labels by the atlas, of any dataset of the corpus's table; only on request: results/runs/{run}/map/{dataset}.h5ad.
rule map:
    input:
        weights="results/runs/{run}/model/model.safetensors",
        config="results/runs/{run}/model/config.json",
        vocabulary="results/runs/{run}/model/vocabulary.tsv",
        atlas="results/runs/{run}/model/atlas/atlas.json",
        cells=jobs.of_corpus("{corpus}/cells/{dataset}.h5ad"),
    output:
        "results/runs/{run}/map/{dataset}.h5ad",
    log:
        "logs/map/{run}.{dataset}.log",
    benchmark:
        "results/benchmarks/map/{run}.{dataset}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        image
    threads: 4
    resources:
        mem_mb=sized(32000, 3),
        runtime=sized(240, 25),
    params:
        options=jobs.options("map"),
    shell:
        'cellmill map --options {params.options:q} --model "$(dirname {input.weights:q})" --input {input.cells:q}'
        " --out {output:q} 2>&1 | tee -i {log:q}"


# Shifts of embeddings without each gene; only on request: results/runs/{run}/knock_out/{dataset}.h5ad.
rule knock_out:
    input:
        weights="results/runs/{run}/model/model.safetensors",
        config="results/runs/{run}/model/config.json",
        vocabulary="results/runs/{run}/model/vocabulary.tsv",
        cells=jobs.of_corpus("{corpus}/cells/{dataset}.h5ad"),
    output:
        "results/runs/{run}/knock_out/{dataset}.h5ad",
    log:
        "logs/knock_out/{run}.{dataset}.log",
    benchmark:
        "results/benchmarks/knock_out/{run}.{dataset}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        image
    threads: 4
    resources:
        mem_mb=sized(32000, 3),
        runtime=sized(240, 25),
    params:
        options=jobs.options("knock_out"),
    message:
        JOB_LINE
    shell:
        'cellmill knock_out --options {params.options:q} --model "$(dirname {input.weights:q})" --input {input.cells:q}'
        " --out {output:q} 2>&1 | tee -i {log:q}"


rule evaluate:
    input:
        weights="results/runs/{run}{at}/model/model.safetensors",
        manifest=jobs.of_corpus("{corpus}/shards/manifest.json"),
        ancestors=jobs.ancestor_manifests,
        cells=jobs.evaluated("{corpus}/cells/{dataset}.h5ad"),
        embeddings=jobs.evaluated("results/runs/{run}{at}/embeddings/{dataset}.h5ad"),
        files=jobs.task_files,
        external=jobs.external_embeddings,
    output:
        metrics=report(
            "results/runs/{run}{at}/evaluate/metrics.json",
            caption="../report/evaluate.rst",
            category="Runs",
            labels={"run": "{run}{at}", "what": "evaluation"},
        ),
        umap="results/runs/{run}{at}/evaluate/umap.tsv",
    log:
        "logs/evaluate/{run}{at}.log",
    benchmark:
        "results/benchmarks/evaluate/{run}{at}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        image
    threads: 4
    resources:
        mem_mb=sized(32000),
        runtime=sized(240),
    params:
        options=jobs.options("evaluate"),
        labels=jobs.label_columns,
        baselines=jobs.of_corpus("{corpus}/baselines"),  # a cache: the same for all runs of a dataset
    message:
        JOB_LINE
    shell:
        'cellmill evaluate --options {params.options:q} --model "$(dirname {input.weights:q})"'
        " --manifest {input.manifest:q} --ancestors {input.ancestors:q} --cells {input.cells:q} --embeddings {input.embeddings:q}"
        " --external {input.external:q} --labels {params.labels:q} --baselines {params.baselines:q} --out {output.metrics:q} 2>&1 | tee -i {log:q}"


# Predicted changes of held-out perturbations, for rule cell_eval; only on request: results/runs/{run}/changes/{dataset}.h5ad.
rule predict_changes:
    input:
        weights="results/runs/{run}{at}/model/model.safetensors",
        manifest=jobs.of_corpus("{corpus}/shards/manifest.json"),
        ancestors=jobs.ancestor_manifests,
        cells=jobs.bridged("{corpus}/cells/{dataset}.h5ad"),
        embedding="results/runs/{run}{at}/embeddings/{dataset}.h5ad",
        files=jobs.task_files,
    output:
        "results/runs/{run}{at}/changes/{dataset}.h5ad",
    log:
        "logs/predict_changes/{run}{at}.{dataset}.log",
    benchmark:
        "results/benchmarks/predict_changes/{run}{at}.{dataset}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        image
    threads: 4
    resources:
        mem_mb=sized(32000, 3),
        runtime=sized(240, 25),
    params:
        options=jobs.options("predict_changes"),
        labels=jobs.bridged_label_columns,
    message:
        JOB_LINE
    shell:
        'cellmill predict_changes --options {params.options:q} --model "$(dirname {input.weights:q})"'
        " --manifest {input.manifest:q} --ancestors {input.ancestors:q} --cells {input.cells:q}"
        " --embedding {input.embedding:q} --labels {params.labels:q} --out {output:q} 2>&1 | tee -i {log:q}"
