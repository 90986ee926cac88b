# Run by Snakemake in the new environment, in the working directory of the workflow: the root of a checkout.
set -e
pip install --requirement envs/requirements.lock
pip install --no-deps .
