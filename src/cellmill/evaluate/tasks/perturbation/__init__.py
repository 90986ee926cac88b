"""Task `perturbation`: units of cells that are held out, predictions of their changes of expression, the
scores of these predictions, and a file of the predictions for other packages.
"""
