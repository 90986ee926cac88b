# Embeddings by presets of `evaluate.external`: rows beside every run of the corpus. Each is fitted on the corpus's training
# cells, whose names are in the shards, by a script in an environment of its own, without cellmill, as bridges are; a newer
# script reruns nothing.


rule zoo:
    input:
        cells="results/corpora/{corpus}/unpacked/{dataset}.h5ad",
        manifest="results/corpora/{corpus}/shards/manifest.json",
    output:
        "results/corpora/{corpus}/zoo/{preset}/{dataset}.h5ad",
    log:
        "logs/zoo/{corpus}.{preset}.{dataset}.log",
    benchmark:
        "results/benchmarks/zoo/{corpus}.{preset}.{dataset}.tsv"
    conda:
        "../../envs/zoo-{preset}.yaml"
    threads: 4
    resources:
        python=lambda wildcards: jobs.bridge_python(wildcards.preset),
        script=lambda wildcards: script(f"zoo_{wildcards.preset}.py"),
        mem_mb=sized(32000, 3),
        runtime=sized(240, 25),
    message:
        JOB_LINE
    shell:
        "{resources.python:q} -W ignore {resources.script:q} --cells {input.cells:q} --manifest {input.manifest:q}"
        " --threads {threads:q} --out {output:q} 2>&1 | tee -i {log:q}"
