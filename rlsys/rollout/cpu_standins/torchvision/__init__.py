"""Stand-in for torchvision: SGLang's image processors import it; a text model never calls it."""

__version__ = "0.28.0"
