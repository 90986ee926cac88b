"""Built-in evaluation tasks, one file each."""
