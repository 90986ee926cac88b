#!/usr/bin/env bash
# Snakemake 9.27.1: a cluster job that ends after its main process was killed leaves no record, and changed params never rerun it.
#
# The record of an output (params, input, code) is written by the process that submitted the job. The job itself removes only the mark
# that its output is incomplete. If the main process is killed (closed terminal, rebooted login node) and the job ends well,
# the output counts as complete, and the triggers params, input and code are skipped for it from then on. A dry run says that a
# job has missing metadata; a run that does the work says nothing, and makes what follows from the old output.
#
# Seen, snakemake-executor-plugin-cluster-generic 1.0.9, rate 0.1 in the job, 0.5 afterwards: the rule does not run again, the rule
# behind it copies 0.1, and the word metadata is in the dry run only.
# Source: our own run, and PersistenceBase.finished in snakemake/persistence/__init__.py. Guess before it: a job that ends well
# is recorded, or its output counts as incomplete.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check snakemake==9.27.1 snakemake-executor-plugin-cluster-generic==1.0.9
cd "$folder"
cat > Snakefile <<'SNAKEFILE'
configfile: "config.yaml"


rule copied:
    input:
        "out.txt",
    output:
        "copy.txt",
    shell:
        "cp {input} {output}"


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
cp "$1" job.part # a queue in which the job waits
mv job.part job.sh
echo 1
SUBMIT
cat > status <<'STATUS'
#!/bin/sh
echo running
STATUS
chmod +x submit status
export PATH="$folder/venv/bin:$PATH" XDG_CACHE_HOME="$folder/cache"
snakemake --version
echo "rate: 0.1" > config.yaml
snakemake --executor cluster-generic --cluster-generic-submit-cmd ./submit --cluster-generic-status-cmd ./status --jobs 1 \
    --quiet all -- out.txt > main.log 2>&1 &
until [ -e job.sh ]; do sleep 0.2; done
sleep 1
kill -KILL $!
wait $! 2> /dev/null || true
sh job.sh > job.log 2>&1
snakemake --unlock 2> /dev/null
echo "the job wrote $(cat out.txt), and its snakemake was killed"
echo "rate: 0.5" > config.yaml
dry=$(snakemake --dry-run 2>&1)
run=$(snakemake --cores 1 2>&1)
echo "rate 0.5, dry run: $(grep -o "jobs have missing provenance/metadata" <<< "$dry")"
echo "rate 0.5, run: out.txt $(cat out.txt), copy.txt $(cat copy.txt), lines on metadata: $(grep -c metadata <<< "$run" || true)"
[ "$(cat out.txt copy.txt | xargs)" = "0.1 0.1" ]
grep -q "missing provenance/metadata" <<< "$dry"
! grep -q metadata <<< "$run"
