"""Passes over the graph, one file each: graph -> graph. Installed and imported as ``autopar.passes``."""

if __name__ != "autopar.passes":
    raise ImportError("import autopar.passes: the top-level folder is only where its source lives")
