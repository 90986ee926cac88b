"""Model families and what they share. A family is a folder: `config` (torch-free) and `model`."""
