"""What things cost, one file per cost: sympy in, numbers out. Imported as ``autopar.cost_models``."""

if __name__ != "autopar.cost_models":
    raise ImportError("import autopar.cost_models: the top-level folder is only where its source lives")
