"""The instruments of *Where Vision Transformers Look*: data, models, measures, runs and pictures."""

__version__ = "0.1.0"
