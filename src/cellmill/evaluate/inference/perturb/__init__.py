"""Predicted response of the control cells of a file to perturbations (`predict.py`)."""
