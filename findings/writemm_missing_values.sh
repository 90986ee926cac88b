#!/usr/bin/env bash
# writeMM of R's package Matrix (1.5-3, Debian 12) writes NA, NaN and Inf as the number 1e308, and reads it back as one.
#
# Matrix Market has no word for a missing value, and writeMM neither stops nor warns. A reader gets a finite number.
# The field of the header depends on the values: whole doubles are `integer`, one fraction makes the file `real`.
#
# Seen: values NA, NaN and Inf: three lines that end in 1e308, header `real`; readMM gives 1e308 three times and no NA;
# values 1 and 2 on the diagonal, stored as doubles: header `integer symmetric`.
# Source: our own run.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
command -v Rscript > /dev/null || apt-get install -y -q --no-install-recommends r-cran-matrix > /dev/null
cd "$folder"
cat > script.R <<'R'
suppressPackageStartupMessages(library(Matrix))
cat("Matrix", as.character(packageVersion("Matrix")), "\n")
missing <- sparseMatrix(i = 1:3, j = c(1, 1, 2), x = c(NA, NaN, Inf), dims = c(3, 2))
invisible(writeMM(missing, "missing.mtx"))
whole <- sparseMatrix(i = 1:2, j = 1:2, x = c(1, 2), dims = c(2, 2))
invisible(writeMM(whole, "whole.mtx"))
lines <- readLines("missing.mtx")
cat(lines, sep = "\n")
back <- readMM("missing.mtx")@x
cat("read back:", back, "\n")
cat(readLines("whole.mtx")[1], "\n")
same <- sum(grepl("1e308$", lines)) == 3 && all(back == 1e308) && grepl("integer", readLines("whole.mtx")[1])
if (!same) stop("the behaviour has changed")
R
Rscript script.R
