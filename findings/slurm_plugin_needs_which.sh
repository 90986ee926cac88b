#!/usr/bin/env bash
# snakemake-executor-plugin-slurm 2.8.0 runs the program `which` when it is imported, with or without a SLURM.
#
# Snakemake imports every plugin that is installed before it reads a command. On an image without `which` (it is a
# package of its own in several distributions) each command, `snakemake --version` too, ends in a traceback whose last
# line names `which` and neither the plugin nor SLURM.
#
# Seen: with `which` on PATH: the version; without: FileNotFoundError: [Errno 2] No such file or directory: 'which'
# Source: our own run; nothing was read of other reports.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check snakemake==9.27.1 snakemake-executor-plugin-slurm==2.8.0
mkdir "$folder/bin"
ln -s "$(command -v sh)" "$(command -v bash)" "$folder/bin"
"$folder/venv/bin/snakemake" --version
said=$(cd "$folder" && HOME="$folder" PATH="$folder/bin" "$folder/venv/bin/python" -m snakemake --version 2>&1) && code=0 || code=$?
printf '%s\n' "$said" | tail -n 1
case "$said" in
*"No such file or directory: 'which'") ;;
*) echo "the behaviour has changed" && exit 1 ;;
esac
[ "$code" -ne 0 ]
