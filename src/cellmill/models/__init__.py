"""Models: the contracts of a family and an objective, their shared layers, and exported folders.

Options are in `config/parts/families.py` and `config/parts/objectives.py`, without torch.
"""
