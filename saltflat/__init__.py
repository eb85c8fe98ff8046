"""How flat a trained network's minimum is, without being fooled by rescaling."""

from saltflat.certificate import Certificate, certify
from saltflat.errors import SaltflatError
from saltflat.sweep import Statistics, statistics_of

__version__ = "0.1.0"
__all__ = ["Certificate", "SaltflatError", "Statistics", "certify", "statistics_of"]
