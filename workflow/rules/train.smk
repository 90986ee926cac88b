# A run: plan, training, export. The machine (nodes, processes, partition …) is in the profile's set-resources, so that
# another machine reruns nothing.


# A model on the hub that a run starts from: `init_from: hf://owner/name`, or `owner/name@revision`.
rule pull:
    output:
        "results/hub/{model}/model.safetensors",
        "results/hub/{model}/config.json",
    log:
        "logs/pull/{model}.log",
    benchmark:
        "results/benchmarks/pull/{model}.tsv"
    localrule: True  # compute nodes often have no way out
    conda:
        "../../envs/cellmill.yaml"
    params:
        folder=lambda wildcards, output: Path(output[0]).parent,
    message:
        JOB_LINE
    shell:
        "cellmill pull {wildcards.model:q} --out {params.folder:q} 2>&1 | tee -i {log:q}"


# The files of a published model that a run starts from: `init_from: geneformer:FOLDER` or `scgpt:FOLDER`.
rule import:
    input:
        jobs.published_files,
    output:
        "results/published/{published}/model.safetensors",
        "results/published/{published}/config.json",
        "results/published/{published}/vocabulary.tsv",
    log:
        "logs/import/{published}.log",
    benchmark:
        "results/benchmarks/import/{published}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    resources:
        mem_mb=sized(8000),
        runtime=sized(60),
    params:
        kind=lambda wildcards: jobs.published[wildcards.published].kind,
        folder=lambda wildcards: jobs.published[wildcards.published].folder,
        out=lambda wildcards, output: Path(output[0]).parent,
    message:
        JOB_LINE
    shell:
        "cellmill import {params.kind:q} {params.folder:q} --out {params.out:q} 2>&1 | tee -i {log:q}"


rule plan:
    input:
        jobs.of_corpus("{corpus}/shards/manifest.json"),
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
    localrule: True  # takes a second, and refuses a run before anything is submitted
    conda:
        "../../envs/cellmill.yaml"
    resources:
        **plan_resources(machines),
    params:
        options=jobs.options("plan"),
        machine=plan_machine,
    message:
        JOB_LINE
    shell:
        # Snakemake sets these to 1, and the speed of CPUs is measured as train will use them
        "unset OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS;"
        " cellmill plan --options {params.options:q} --manifest {input:q} --out {output:q} {params.machine:q}"
        " 2>&1 | tee -i {log:q}"


# The teacher's vectors of the cells that a run with objective distill reads.
rule teach:
    input:
        manifest=jobs.of_corpus("{corpus}/shards/manifest.json"),
        embeddings=lambda wildcards: pipeline.teacher_files(wildcards.run),
    output:
        vectors="results/runs/{run}/teacher/vectors.npy",
        about="results/runs/{run}/teacher/vectors.json",
    log:
        "logs/teach/{run}.log",
    benchmark:
        "results/benchmarks/teach/{run}.tsv"
    conda:
        "../../envs/cellmill.yaml"
    resources:
        mem_mb=sized(8000, 1),  # all vectors
        runtime=sized(60, 300),
    message:
        JOB_LINE
    shell:
        "cellmill teach --manifest {input.manifest:q} --embeddings {input.embeddings:q}"
        ' --out "$(dirname {output.about:q})" 2>&1 | tee -i {log:q}'


# Only status.json is an output: Snakemake deletes the outputs of a failed job, and the run resumes from the checkpoints
# in that folder. It starts its processes or submits its jobs itself, so it is a local rule.
rule train:
    input:
        manifest=jobs.of_corpus("{corpus}/shards/manifest.json"),
        vocabulary=jobs.of_corpus("{corpus}/vocabulary.tsv"),
        # a plan that refuses stops the run. Not ancient(): Snakemake would then miss changed options of train whenever
        # plan reruns. A training with the same options ends at once as done.
        plan="results/runs/{run}/plan.json",
        parent=jobs.parents,
    output:
        "results/runs/{run}/train/status.json",
    log:
        "logs/train/{run}.log",
    benchmark:
        "results/benchmarks/train/{run}.tsv"
    retries: 0  # it resumes by itself after failures of the machine; an error of its own would come again
    localrule: True
    conda:
        "../../envs/cellmill.yaml"
    resources:
        **train_resources(machines),
        restart=lambda wildcards: "--restart" if wildcards.run in restarted else "",
    params:
        options=jobs.options("train"),
        parent=jobs.parent_arguments,
        machine=train_machine,
    message:
        JOB_LINE
    shell:
        # Snakemake sets these to the threads of the rule; the launcher divides the cores over the processes
        "unset OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS;"
        " cellmill train --options {params.options:q} --manifest {input.manifest:q} --vocabulary {input.vocabulary:q}"
        ' --out "$(dirname {output:q})" {params.parent:q} {resources.restart:q} {params.machine:q}'
        # a launcher says in its last line how to go on, also if SIGTERM or SIGHUP goes to the process group
        " 2>&1 | (trap '' TERM HUP; exec tee -i {log:q})"


MODEL_FILES = ("model.safetensors", "config.json", "vocabulary.tsv", "README.md")


# `at` is empty, or the step of a kept checkpoint: results/runs/{run}/steps/{step}/model/config.json.
rule consolidate:
    input:
        status="results/runs/{run}/train/status.json",
        vocabulary=jobs.of_corpus("{corpus}/vocabulary.tsv"),
        shards=jobs.of_corpus("{corpus}/shards/manifest.json"),
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
    threads: 4  # to embed validation cells
    resources:
        mem_mb=sized(8000),  # the model's weights
        runtime=sized(60),
    params:
        # Snakemake deletes the status of a training that failed, and asks for it only if this rule has a reason to run:
        # other options of the training, or newer shards
        trained=lambda wildcards: digest(jobs.section("train", wildcards)),
        options=jobs.options("consolidate"),
    message:
        JOB_LINE
    shell:
        'cellmill consolidate --options {params.options:q} --train "$(dirname {input.status:q})"'
        ' --vocabulary {input.vocabulary:q} --out "$(dirname {output.weights:q})" 2>&1 | tee -i {log:q}'
