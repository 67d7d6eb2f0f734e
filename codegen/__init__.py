"""Kernel IR to C source to a shared library: targets, ISA tables, lowering, lift, toolchain."""

if __name__ != "dovetail.codegen":  # the root on sys.path would import every module twice
    raise ImportError("import dovetail.codegen, not codegen")
