"""Measurements of the parts on this machine: `sao bench`."""
