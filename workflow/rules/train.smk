# A run: plan, training, export. The machine (nodes, processes, partition …) is in the profile's set-resources, so that
# another machine reruns nothing.


localrules:
    pull,  # compute nodes often have no way out
    plan,  # takes a second, and refuses a run before anything is submitted
    train,


# A model on the hub that a run starts from: `init_from: hf://owner/name`, or `owner/name@revision`.
rule pull:
    output:
        "results/hub/{model}/model.safetensors",
        "results/hub/{model}/config.json",
    log:
        "logs/pull/{model}.log",
    benchmark:
        "results/benchmarks/pull/{model}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    params:
        folder=lambda wildcards, output: Path(output[0]).parent,
    shell:
        "cellmill pull {wildcards.model:q} --out {params.folder:q} 2>&1 | tee -i {log:q}"


rule plan:
    input:
        lambda wildcards: f"{corpus_of(wildcards)}/shards/manifest.json",
    output:
        report(
            "results/runs/{run}/plan.json",
            caption="../report/plan.rst",
            category="Runs",
            labels={"run": "{run}", "what": "plan"},
        ),
    log:
        "logs/plan/{run}.log",
    benchmark:
        "results/benchmarks/plan/{run}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    resources:
        nodes=of_train("nodes"),
        nproc_per_node=of_train("nproc_per_node"),
        device=plan_defaults.get("device", "cpu"),
    params:
        options=options("plan"),
        options_file=options_file("plan"),
        fits=fits_processes,  # depends on resources, which Snakemake takes for no reason to rerun
    shell:
        "cellmill plan --options {params.options_file:q} --manifest {input:q} --out {output:q} --nodes {resources.nodes:q}"
        " --nproc-per-node {resources.nproc_per_node:q} --device {resources.device:q} 2>&1 | tee -i {log:q}"


by_machine("plan")


# Only status.json is an output: Snakemake deletes the outputs of a failed job, and the run resumes from the checkpoints
# in that folder. It starts its processes or submits its jobs itself, so it is a local rule.
rule train:
    input:
        manifest=lambda wildcards: f"{corpus_of(wildcards)}/shards/manifest.json",
        vocabulary=lambda wildcards: f"{corpus_of(wildcards)}/vocabulary.tsv",
        # a plan that refuses stops the run. Not ancient(): Snakemake would then miss changed options of train whenever
        # plan reruns. A training with the same options ends at once as done.
        plan="results/runs/{run}/plan.json",
        parent=parent_files,
        vectors=gene_vectors,
    output:
        "results/runs/{run}/train/status.json",
    log:
        "logs/train/{run}.log",
    benchmark:
        "results/benchmarks/train/{run}.tsv"
    retries: 0  # it resumes by itself after failures of the machine; an error of its own would come again
    conda:
        "../../envs/cellmill.yaml"
    resources:
        **machine_defaults,
    params:
        options=options("train"),
        options_file=options_file("train"),
        fits=fits_processes,
        parent=parent_argument,
        restart=restart_argument,
        machine=machine_argument,
    shell:
        # Snakemake sets these to the threads of the rule; the launcher divides the cores over the processes
        "unset OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS;"
        " cellmill train --options {params.options_file:q} --manifest {input.manifest:q} --vocabulary {input.vocabulary:q}"
        ' --out "$(dirname {output:q})" {params.parent:q} {params.restart:q} {params.machine:q} 2>&1 | tee -i {log:q}'


by_machine("train")


# `at` is empty, or the step of a kept checkpoint: results/runs/{run}/steps/{step}/model/config.json.
rule consolidate:
    input:
        status="results/runs/{run}/train/status.json",
        vocabulary=lambda wildcards: f"{corpus_of(wildcards)}/vocabulary.tsv",
        shards=lambda wildcards: f"{corpus_of(wildcards)}/shards/manifest.json",
    output:
        weights="results/runs/{run}{at}/model/model.safetensors",
        config="results/runs/{run}{at}/model/config.json",
        vocabulary="results/runs/{run}{at}/model/vocabulary.tsv",
        card=report(
            "results/runs/{run}{at}/model/README.md",
            caption="../report/consolidate.rst",
            category="Runs",
            labels={"run": "{run}{at}", "what": "model card"},
        ),
    log:
        "logs/consolidate/{run}{at}.log",
    benchmark:
        "results/benchmarks/consolidate/{run}{at}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    params:
        options=options("consolidate"),
        # Snakemake deletes the status of a training that failed, and asks for it only if this rule has a reason to run:
        # other options of the training, or newer shards
        trained=lambda wildcards: digest(section_of("train", wildcards)),
        options_file=options_file("consolidate"),
    shell:
        'cellmill consolidate --options {params.options_file:q} --train "$(dirname {input.status:q})"'
        ' --vocabulary {input.vocabulary:q} --out "$(dirname {output.weights:q})" 2>&1 | tee -i {log:q}'
