"""titanlite pretrains language models from a TOML file. Start reading at training/build.py."""

__version__ = "0.1.0"
