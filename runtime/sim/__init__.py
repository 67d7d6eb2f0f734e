"""Simulations of the house: virtual time, assumed machines; no product code imports them."""
