"""An artifact to tokens: load, kernels, KV pages, scheduler, executor."""

if __name__ != "dovetail.runtime":  # the root on sys.path would import every module twice
    raise ImportError("import dovetail.runtime, not runtime")
