#!/usr/bin/env bash
# snakemake-executor-plugin-slurm 2.8.0: with `--slurm-array-jobs` all jobs of a rule get the memory and time of the first one.
#
# A rule may compute `mem_mb` and `runtime` from wildcards, inputs or the attempt; submitted one by one, each job asks for its own. As an
# array they are one sbatch call, made from the resources of whichever job is first in the list. A large sample behind a small one
# runs out of memory or time, and a retry of several is an array again. Nothing is printed; the log of Snakemake shows each job
# with its own resources.
#
# Seen, a rule whose mem_mb is 1000 for one sample and 9000 for the other: one by one: both. As an array: one call whose --mem is 9001
# if sample b is the large one, and 1001 if it is the small one (a little is added for the list of commands).
# Source: our own run with a stand-in sbatch, and run_array_jobs of the plugin. Guess before it: jobs of unequal requests
# are not put into one array, or the array asks for the largest.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check snakemake==9.27.1 snakemake-executor-plugin-slurm==2.8.0
cd "$folder"
mkdir bin
cat > bin/sbatch <<'SBATCH'
#!/bin/sh
echo "$*" >> "$CALLS"
echo 7
SBATCH
printf '#!/bin/sh\necho "MaxArraySize = 1001"\n' > bin/scontrol
for name in squeue sacct sinfo sacctmgr scancel; do printf '#!/bin/sh\n' > "bin/$name"; done
chmod +x bin/*
cat > Snakefile <<'SNAKEFILE'
rule all:
    input:
        expand("{sample}.txt", sample=["a", "b"]),


rule sized:
    output:
        "{sample}.txt",
    resources:
        mem_mb=lambda wildcards: 9000 if wildcards.sample == config["large"] else 1000,
        runtime=5,
    shell:
        "echo {wildcards.sample} > {output}"
SNAKEFILE
export PATH="$folder/bin:$folder/venv/bin:$PATH" HOME="$folder" XDG_CACHE_HOME="$folder/cache" CALLS="$folder/calls"
snakemake --version
submit() {
    # the stand-in never runs a job, so Snakemake is killed once it has submitted
    rm -rf calls .snakemake
    touch calls
    setsid snakemake --executor slurm --jobs 2 --default-resources slurm_account=a slurm_partition=p --config "large=$1" $2 > log 2>&1 &
    for _ in $(seq 60); do
        sleep 1
        [ "$(wc -l < calls)" -lt "$3" ] || break
    done
    kill -9 -- "-$!"
    wait "$!" 2> /dev/null || true
    grep -Eo -e '--mem[= ][0-9]+' calls | grep -Eo '[0-9]+' | sort -n | xargs
}
alone=$(submit a "" 2)
a=$(submit a --slurm-array-jobs=all 1)
b=$(submit b --slurm-array-jobs=all 1)
echo "one by one: $alone; as an array, a is large: $a; as an array, b is large: $b"
[ "$alone" = "1000 9000" ]
[ "$(printf '%s\n' "$a" "$b" | sort -n | xargs)" = "1001 9001" ]
