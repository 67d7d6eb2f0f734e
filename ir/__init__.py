"""Shared values: spans, diagnostics, dtypes, the two kernel IRs, tapes and artifact schemas."""

if __name__ != "dovetail.ir":  # the root on sys.path would import every module twice
    raise ImportError("import dovetail.ir, not ir")
