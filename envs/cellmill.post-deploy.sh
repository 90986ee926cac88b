# Run by Snakemake in the new environment, from where the workflow runs: the root of a checkout.
set -e
pip install --requirement envs/requirements.lock
pip install --no-deps .
