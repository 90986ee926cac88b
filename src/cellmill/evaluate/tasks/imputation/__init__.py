"""Task `imputation`: the methods that predict hidden genes of cells, and the scores of their predictions."""
