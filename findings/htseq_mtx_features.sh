#!/usr/bin/env bash
# HTSeq 2.1.2 with --additional-attr leaves out the names of the last five features of a .mtx, and writes it dense.
#
# The matrix of htseq-count -c counts.mtx has a column for each gene, then __no_feature, __ambiguous, __too_low_aQual,
# __not_aligned and __alignment_not_unique. With an additional attribute, counts_features.tsv has a line for each gene
# alone: the writer counts the lines by the last attribute, which the five do not have. Without the option
# --counts-output-sparse the matrix is a dense Matrix Market array of floats, which readers of coordinates refuse.
#
# Seen: 3 genes: 8 columns and 8 names without --additional-attr, 8 columns and 3 names with it; header `array real`
# without --counts-output-sparse, `coordinate real` with it.
# Source: our own run.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check HTSeq==2.1.2 scipy==1.16.3
cd "$folder"
{
    printf '@HD\tVN:1.6\tSO:coordinate\n@SQ\tSN:1\tLN:10000\n'
    for read in 1 2; do
        printf 'r%s\t0\t1\t150\t255\t10M\t*\t0\t0\tAAAAAAAAAA\tIIIIIIIIII\n' "$read"
    done
} > cell.sam
for gene in 1 2 3; do
    printf '1\tx\texon\t%s01\t%s90\t.\t+\t.\tgene_id "ID%s"; gene_name "NAME%s";\n' "$gene" "$gene" "$gene" "$gene"
done > genes.gtf
count="venv/bin/htseq-count -q -s no"
$count -c dense.mtx cell.sam genes.gtf
$count --counts-output-sparse -c plain.mtx cell.sam genes.gtf
$count --counts-output-sparse --additional-attr gene_name -c named.mtx cell.sam genes.gtf
venv/bin/pip list 2> /dev/null | grep -i '^htseq'
same=yes
expect() { # NAME FOUND EXPECTED
    echo "$1: $2"
    [ "$2" = "$3" ] || same=no
}
columns() { grep -v '^%' "$1" | head -n 1 | cut -d ' ' -f 2; }
names() { tail -n +2 "$1" | wc -l | tr -d ' '; }
expect "header by default" "$(head -n 1 dense.mtx)" "%%MatrixMarket matrix array real general"
expect "header with --counts-output-sparse" "$(head -n 1 plain.mtx)" "%%MatrixMarket matrix coordinate real general"
expect "columns, names" "$(columns plain.mtx) $(names plain_features.tsv)" "8 8"
expect "columns, names with --additional-attr" "$(columns named.mtx) $(names named_features.tsv)" "8 3"
[ "$same" = yes ] || { echo "the behaviour has changed"; exit 1; }
