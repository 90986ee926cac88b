#!/usr/bin/env bash
# Snakemake 9.27.1: a cluster job reads the configuration file when it starts, and is recorded with the values of its submission.
#
# The main process submits a job as a command of Snakemake, which parses the Snakefile on the node and reads `configfile:` anew.
# If the file is edited while the job waits in the queue, the job runs with the edited values. The main process, which read the file
# before, records `params` of the submission as those of the output. If the edit is taken back, the output is up to date with
# values that did not make it; if it stays, the rule runs again although the output is right. Nothing warns. `--config KEY=VALUE`
# is part of the job's command, and stays.
#
# Seen, snakemake-executor-plugin-cluster-generic 1.0.9, a job submitted with rate 0.1 that starts after an edit to 0.5: out.txt has 0.5.
# With rate 0.1 again: "Nothing to be done". With rate 0.5: params changed, the rule runs again.
# Source: our own run. Guess before it: a job runs with the configuration that it was submitted with.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check snakemake==9.27.1 snakemake-executor-plugin-cluster-generic==1.0.9
cd "$folder"
cat > Snakefile <<'SNAKEFILE'
configfile: "config.yaml"


rule made:
    output:
        "out.txt",
    params:
        rate=config["rate"],
    shell:
        "echo {params.rate} > {output}"
SNAKEFILE
cat > submit <<'SUBMIT'
#!/bin/sh
# A queue in which the job waits until the file `start` is there.
(until [ -e start ]; do sleep 0.2; done; sh "$1" > job.log 2>&1; echo success > state) > /dev/null 2>&1 &
touch queued
echo 1
SUBMIT
cat > status <<'STATUS'
#!/bin/sh
cat state 2> /dev/null || echo running
STATUS
chmod +x submit status
export PATH="$folder/venv/bin:$PATH" XDG_CACHE_HOME="$folder/cache"
snakemake --version
echo "rate: 0.1" > config.yaml
snakemake --executor cluster-generic --cluster-generic-submit-cmd ./submit --cluster-generic-status-cmd ./status --jobs 1 \
    --seconds-between-status-checks 1 --quiet all > main.log 2>&1 &
until [ -e queued ]; do sleep 0.2; done
echo "rate: 0.5" > config.yaml
touch start
wait $!
made=$(cat out.txt)
echo "submitted with 0.1, edited to 0.5 in the queue: the job wrote $made"
echo "rate: 0.1" > config.yaml
back=$(snakemake --dry-run 2>&1)
echo "0.1 again: $(grep -o "Nothing to be done" <<< "$back")"
echo "rate: 0.5" > config.yaml
kept=$(snakemake --dry-run 2>&1)
echo "0.5: $(grep -o "Params have changed" <<< "$kept" | head -1)"
[ "$made" = 0.5 ]
grep -q "Nothing to be done" <<< "$back"
grep -q "Params have changed" <<< "$kept"
