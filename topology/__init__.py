"""HardwareSpec of a machine, and binding threads to its cores."""

if __name__ != "dovetail.topology":  # the root on sys.path would import every module twice
    raise ImportError("import dovetail.topology, not topology")
