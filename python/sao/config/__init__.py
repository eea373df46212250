"""The configuration of a run: sections, what goes together with what, and how faults are explained."""

from sao.config.run import Config, load, parse, save, toml_override

__all__ = ["Config", "load", "parse", "save", "toml_override"]
