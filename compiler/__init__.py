"""A model, a machine and a workload to an artifact."""

if __name__ != "dovetail.compiler":  # the root on sys.path would import every module twice
    raise ImportError("import dovetail.compiler, not compiler")
