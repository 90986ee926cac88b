"""Built-in evaluation tasks. Each is a module, or a folder with a module `task.py`.

Folder `classification` has the tasks that predict labels. Module `gene_task.py` has the base of the tasks
about genes.
"""
