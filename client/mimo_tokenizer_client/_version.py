"""The installed version, for `__version__` and the `x-client` metadata."""

from importlib.metadata import version

__version__ = version("mimo-audio-tokenizer-service")
