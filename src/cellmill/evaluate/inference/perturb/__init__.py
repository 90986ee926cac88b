"""Predicted response of the control cells in a file to perturbations (`predict.py`)."""
