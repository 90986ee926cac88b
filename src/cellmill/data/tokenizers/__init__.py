"""Built-in tokenizers, one file each. Library size and quantiles are those of the whole cell, also where it is cut."""
