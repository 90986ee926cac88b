#!/usr/bin/env bash
# Snakemake 9.27.1: a parameter that a function computes is not compared with that of the last run if the function asks for more than
# wildcards.
#
# Rules rerun when their `params` change. `lambda wildcards: config["rate"]` is compared; with one more argument, `input`, `output`,
# `threads` or `resources`, the same function is not, whether or not it uses the argument. After a change of the
# configuration such rules are up to date, and results of the old value stay next to new ones. Nothing warns. A second
# parameter that only asks for wildcards, with what the first one depends on, makes the rule rerun.
#
# Seen, five rules that write params.rate, 0.1 and then 0.5: the rule of wildcards alone runs again and has 0.5; the other four keep
# 0.1. A sixth with `lambda wildcards, input` and the value as a second parameter has 0.5.
# Source: our own run; that of `input` is Snakemake's issue 3895. Guess before it: a rule reruns when the value that its function
# returns changes, whatever arguments it has.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check snakemake==9.27.1
cd "$folder"
cat > Snakefile <<'SNAKEFILE'
configfile: "config.yaml"


rule all:
    input:
        expand("{name}.txt", name=["wildcards", "input", "output", "threads", "resources", "second"]),


rule wildcards:
    input:
        "cells",
    output:
        "wildcards.txt",
    params:
        rate=lambda wildcards: config["rate"],
    shell:
        "echo {params.rate} > {output}"


use rule wildcards as input with:
    output:
        "input.txt",
    params:
        rate=lambda wildcards, input: config["rate"],


use rule wildcards as output with:
    output:
        "output.txt",
    params:
        rate=lambda wildcards, output: config["rate"],


use rule wildcards as threads with:
    output:
        "threads.txt",
    params:
        rate=lambda wildcards, threads: config["rate"],


use rule wildcards as resources with:
    output:
        "resources.txt",
    params:
        rate=lambda wildcards, resources: config["rate"],


use rule wildcards as second with:
    output:
        "second.txt",
    params:
        rate=lambda wildcards, input: config["rate"],
        compared=lambda wildcards: config["rate"],
SNAKEFILE
export PATH="$folder/venv/bin:$PATH" XDG_CACHE_HOME="$folder/cache"
snakemake --version
touch cells
for rate in 0.1 0.5; do
    echo "rate: $rate" > config.yaml
    snakemake --cores 1 --quiet all
    echo "rate $rate:"
    for name in wildcards input output threads resources second; do
        echo "  $name $(cat $name.txt)"
    done
done
[ "$(cat wildcards.txt input.txt output.txt threads.txt resources.txt second.txt | xargs)" = "0.5 0.1 0.1 0.1 0.1 0.5" ]
