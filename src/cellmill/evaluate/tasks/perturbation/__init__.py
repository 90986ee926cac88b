"""Task `perturbation`: units that are held out, their changes, scores, and the file for other packages."""
