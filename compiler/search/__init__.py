"""Kernel search: which micro-kernel, computation slice and thread grid serves which M."""
