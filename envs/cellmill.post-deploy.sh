# Run by Snakemake in the new environment, in the working directory of the workflow: the checkout, unless --directory or a
# module makes it another one.
set -e
checkout=${CELLMILL_CHECKOUT:-.}
if [ ! -f "$checkout/envs/requirements.lock" ]; then
    echo "cellmill: $checkout has no envs/requirements.lock; set CELLMILL_CHECKOUT to the checkout of cellmill" >&2
    exit 1
fi
pip install --requirement "$checkout/envs/requirements.lock"
pip install --no-deps "$checkout"
