# Datasets to a corpus: preprocessed cells, a vocabulary, shards.
#
# Memory and runtime are defaults of a cluster job without a profile: more than the work needs, with room for the two
# snakemake processes in a job of the SLURM plugin. They grow with the size of the input: obs and some numbers per cell are
# in memory, and times are four times those of one core. The image is used with `--sdm apptainer`.

image = f"{os.path.relpath(checkout)}/envs/cellmill.sif"
image = None if re.search(r"\s", image) else image  # Snakemake refuses an image whose path has a space


rule demo_data:
    output:
        "data/demo/pbmc68k.h5ad",
    log:
        "logs/demo/pbmc68k.log",
    benchmark:
        "results/benchmarks/demo/pbmc68k.tsv"
    localrule: True  # copies a small file
    conda:
        "../../envs/cellmill.yaml"
    message:
        JOB_LINE
    shell:
        "cellmill demo --out {output:q} 2>&1 | tee -i {log:q}"


# The copy is in a cache that workflows share; the output says where it is, and its SHA-256.
rule fetch:
    output:
        "results/corpora/{corpus}/inputs/{dataset}.fetched.json",
    log:
        "logs/fetch/{corpus}.{dataset}.log",
    benchmark:
        "results/benchmarks/fetch/{corpus}.{dataset}.tsv"
    localrule: True  # compute nodes often have no way out
    conda:
        "../../envs/cellmill.yaml"
    params:
        url=lambda wildcards: jobs.dataset(wildcards).path,
    message:
        JOB_LINE
    shell:
        "cellmill fetch --input {params.url:q} --out {output:q} 2>&1 | tee -i {log:q}"


rule preprocess:
    input:
        raw=jobs.raw,
        orthologs=jobs.option_file("preprocess", "orthologs"),
        label_maps=jobs.label_maps,
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
        image
    resources:
        mem_mb=sized(8000, 5),
        runtime=sized(120, 200),
    params:
        options=jobs.options("preprocess"),
        counts=lambda wildcards: jobs.dataset(wildcards).counts,
        columns=jobs.columns,
        # `--source=…`: Snakemake quotes an empty string as nothing, and the option would take the next word
        source=lambda wildcards: jobs.dataset(wildcards).source or "",
        licence=lambda wildcards: jobs.dataset(wildcards).licence or "",
    message:
        JOB_LINE
    shell:
        "cellmill preprocess --options {params.options:q} --dataset {wildcards.dataset:q}"
        " --input {input.raw:q} --counts {params.counts:q} {params.columns:q} --source={params.source:q} --licence={params.licence:q}"
        " --out {output.cells:q} --report {output.report:q}"
        " 2>&1 | tee -i {log:q}"


# Cells with X, for scripts that run without cellmill.
rule unpack:
    input:
        "results/corpora/{corpus}/cells/{dataset}.h5ad",
    output:
        temp("results/corpora/{corpus}/unpacked/{dataset}.h5ad"),
    log:
        "logs/unpack/{corpus}.{dataset}.log",
    benchmark:
        "results/benchmarks/unpack/{corpus}.{dataset}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        image
    resources:
        mem_mb=sized(2000, 1),
        runtime=sized(30, 10),
    message:
        JOB_LINE
    shell:
        "cellmill unpack {input:q} --out {output:q} 2>&1 | tee -i {log:q}"


rule vocabulary:
    input:
        cells=jobs.cells,
        genes=jobs.option_file("vocabulary", "genes"),
        medians=jobs.option_file("vocabulary", "medians"),
    output:
        "results/corpora/{corpus}/vocabulary.tsv",
    log:
        "logs/vocabulary/{corpus}.log",
    benchmark:
        "results/benchmarks/vocabulary/{corpus}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        image
    resources:
        mem_mb=sized(4000, 12),
        runtime=sized(60, 300),
    params:
        options=jobs.vocabulary_options,
    message:
        JOB_LINE
    shell:
        "cellmill vocabulary --options {params.options:q} --cells {input.cells:q} --out {output:q} 2>&1 | tee -i {log:q}"


# With `shard.jobs`, shards are written by as many jobs, from one plan. The number is an option and no checkpoint that follows
# from the cells: a checkpoint hides the rest of the workflow from `snakemake -n` until the vocabulary is there, and adds
# three jobs to every small corpus. Parts that a killed job finished are kept in either case.
rule divide:
    input:
        cells=jobs.cells,
        vocabulary="results/corpora/{corpus}/vocabulary.tsv",
    output:
        "results/corpora/{corpus}/shards/parts/plan.json",
    log:
        "logs/divide/{corpus}.log",
    benchmark:
        "results/benchmarks/divide/{corpus}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        image
    resources:
        mem_mb=sized(16000, 12),
        runtime=sized(240, 120),
    params:
        options=jobs.options("divide"),
    message:
        JOB_LINE
    shell:
        "cellmill divide --options {params.options:q} --cells {input.cells:q} --vocabulary {input.vocabulary:q}"
        " --out {output:q} 2>&1 | tee -i {log:q}"


rule shard_part:
    input:
        cells=jobs.cells,
        vocabulary="results/corpora/{corpus}/vocabulary.tsv",
        plan="results/corpora/{corpus}/shards/parts/plan.json",
    output:
        "results/corpora/{corpus}/shards/parts/{part}.json",
    log:
        "logs/shard_part/{corpus}.{part}.log",
    benchmark:
        "results/benchmarks/shard_part/{corpus}.{part}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        image
    resources:
        mem_mb=sized(16000, 12),
        runtime=sized(240, 120),
    params:
        options=jobs.options("shard_part"),
    message:
        JOB_LINE
    shell:
        "cellmill shard_part --options {params.options:q} --cells {input.cells:q} --vocabulary {input.vocabulary:q}"
        " --part {wildcards.part:q} --out {output:q} 2>&1 | tee -i {log:q}"


rule shard:
    input:
        cells=jobs.cells,
        vocabulary="results/corpora/{corpus}/vocabulary.tsv",
        parts=jobs.parts,
    output:
        "results/corpora/{corpus}/shards/manifest.json",
    log:
        "logs/shard/{corpus}.log",
    benchmark:
        "results/benchmarks/shard/{corpus}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    container:
        image
    resources:
        mem_mb=sized(16000, 12),
        runtime=sized(240, 120),
    params:
        options=jobs.options("shard"),
    message:
        JOB_LINE
    shell:
        "cellmill shard --options {params.options:q} --cells {input.cells:q} --vocabulary {input.vocabulary:q}"
        " --out {output:q} 2>&1 | tee -i {log:q}"
