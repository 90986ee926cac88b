# Datasets to a corpus: preprocessed cells, a vocabulary, shards.
#
# Memory and runtime are defaults of a cluster job without a profile: more than the work needs, with room for the two
# snakemake processes in a job of the SLURM plugin. The image is used with `--sdm apptainer`.


localrules:
    demo_data,  # copies a small file


rule demo_data:
    output:
        "data/demo/pbmc68k.h5ad",
    log:
        "logs/demo/pbmc68k.log",
    benchmark:
        "results/benchmarks/demo/pbmc68k.tsv"
    conda:
        "../../envs/cellmill.yaml"
    shell:
        "cellmill demo --out {output:q} 2>&1 | tee -i {log:q}"


rule preprocess:
    input:
        lambda wildcards: dataset_of(wildcards).path,
    output:
        cells="results/corpora/{corpus}/cells/{dataset}.h5ad",
        report=report(
            "results/corpora/{corpus}/cells/{dataset}.json",
            caption="../report/preprocess.rst",
            category="Data",
            labels={"corpus": "{corpus}", "what": "quality control of {dataset}"},
        ),
    log:
        "logs/preprocess/{corpus}.{dataset}.log",
    benchmark:
        "results/benchmarks/preprocess/{corpus}.{dataset}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        "envs/cellmill.sif"
    resources:
        mem_mb=8000,
        runtime=120,
    params:
        options=options("preprocess"),
        counts=lambda wildcards: dataset_of(wildcards).counts,
        # `--source=…`: Snakemake quotes an empty string as nothing, and the option would take the next word
        source=lambda wildcards: dataset_of(wildcards).source or "",
        licence=lambda wildcards: dataset_of(wildcards).licence or "",
    shell:
        "cellmill preprocess --options {params.options:q} --dataset {wildcards.dataset:q}"
        " --input {input:q} --counts {params.counts:q} --source={params.source:q} --licence={params.licence:q}"
        " --out {output.cells:q} --report {output.report:q}"
        " 2>&1 | tee -i {log:q}"


rule vocabulary:
    input:
        cells_of_corpus,
    output:
        "results/corpora/{corpus}/vocabulary.tsv",
    log:
        "logs/vocabulary/{corpus}.log",
    benchmark:
        "results/benchmarks/vocabulary/{corpus}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        "envs/cellmill.sif"
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        options=options("vocabulary"),
    shell:
        "cellmill vocabulary --options {params.options:q} --cells {input:q} --out {output:q} 2>&1 | tee -i {log:q}"


rule shard:
    input:
        cells=cells_of_corpus,
        vocabulary="results/corpora/{corpus}/vocabulary.tsv",
    output:
        "results/corpora/{corpus}/shards/manifest.json",
    log:
        "logs/shard/{corpus}.log",
    benchmark:
        "results/benchmarks/shard/{corpus}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        "envs/cellmill.sif"
    resources:
        mem_mb=16000,
        runtime=240,
    params:
        options=options("shard"),
    shell:
        "cellmill shard --options {params.options:q} --cells {input.cells:q} --vocabulary {input.vocabulary:q}"
        " --out {output:q} 2>&1 | tee -i {log:q}"
