"""python -m saltflat"""

from saltflat.cli import main

main()
