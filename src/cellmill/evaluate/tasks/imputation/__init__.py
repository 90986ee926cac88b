"""Task `imputation`: cells with hidden genes, what predicts these genes, and the scores of predictions."""
