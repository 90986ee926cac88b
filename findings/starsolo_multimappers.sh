#!/usr/bin/env bash
# STARsolo 2.7.10b writes UniqueAndMult-EM.mtx with field `real` and only into raw/, next to names of all barcodes.
#
# Reports of other versions show the field `float`, which the Matrix Market format does not have. The folder filtered/
# has only matrix.mtx, so whoever wants multi-mapped reads of real cells has to pair the raw matrix with raw/barcodes.tsv:
# filtered/barcodes.tsv has fewer names than the matrix has columns.
#
# Seen: raw/ has barcodes.tsv, features.tsv, matrix.mtx and UniqueAndMult-EM.mtx, filtered/ the first three; header
# `%%MatrixMarket matrix coordinate real general`.
# Source: our own run on simulated reads (Debian 12, package rna-star).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
command -v STAR > /dev/null || apt-get install -y -q --no-install-recommends rna-star > /dev/null
python3 "$here/tiny_reads.py" "$folder"
cd "$folder"
STAR --runMode genomeGenerate --genomeDir index --genomeFastaFiles genome.fa --sjdbGTFfile genes.gtf \
  --genomeSAindexNbases 5 --sjdbOverhang 89 > /dev/null
STAR --genomeDir index --readFilesIn R2.fastq R1.fastq --soloType CB_UMI_Simple --soloUMIlen 12 \
  --soloCBwhitelist barcodes.txt --soloMultiMappers EM --soloCellFilter TopCells 3 --outSAMtype None > /dev/null
echo "STAR $(STAR --version)"
raw=$(ls Solo.out/Gene/raw | sort | tr '\n' ' ')
filtered=$(ls Solo.out/Gene/filtered | sort | tr '\n' ' ')
header=$(head -1 Solo.out/Gene/raw/UniqueAndMult-EM.mtx)
echo "raw: $raw"
echo "filtered: $filtered"
echo "$header"
[ "$header" = "%%MatrixMarket matrix coordinate real general" ] || { echo "the behaviour has changed"; exit 1; }
case "$filtered" in *UniqueAndMult*) echo "the behaviour has changed"; exit 1 ;; esac
case "$raw" in *UniqueAndMult-EM.mtx*) ;; *) echo "the behaviour has changed"; exit 1 ;; esac
