"""Built-in evaluation tasks: a module each, or a folder with `task.py`; `classification` has those that
predict labels, and `gene_task.py` the base of those about genes.
"""
