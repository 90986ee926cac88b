"""One toy of each kind of plug-in."""
